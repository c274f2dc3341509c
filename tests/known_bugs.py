"""What whence does wrong still, as far as a test shows it: expected failures, by file, each with its cause.

A test is named by its name or the beginning of it. The failures are strict: a test that passes again fails
the run until its line here is deleted.
"""

_TWIN = "an operator and its functional twin are matched by the names of their arguments, not by their types"
_LATE_VIEW = "a view that is made again for the result has the origin of the last node of the backward"
_SCATTER = "PyTorch's derivative of as_strided_scatter is wrong"
_WARNING = "a buffer that is reassigned is warned about as if its value were lost"
_LOSS = "an error in the loss function is placed in the root module"
_OTHER_ERROR = "PyTorch's own error passes"
_FLAGS = "verify does not restore requires_grad"
_EXPANDED = "an input is copied into the expanded layout of the capture"
_LAID_OUT = "a gradient is copied into the layout of the capture, and sums round otherwise"
_WRITTEN = "an argument that is written and returned loses its history"
_STATE = "a parameter given as an argument counts as a value from outside in the backward"
_ATTRIBUTE = "the tree has an attribute of this name"

KNOWN_BUGS = {
    "_torch/test_operators.py": {
        "test_functional_twin[pow_.Scalar": _TWIN,
        "test_twin_takes_the_same_kinds_of_arguments": _TWIN,
    },
    "tracing/test_writes_to_values.py": {
        "test_write_to_a_value[power": _TWIN,
        "test_write_to_a_value[diagonal_filled-forward": _SCATTER,
        "test_write_to_a_value[broadcast_copied-forward": "a gradient of zeros is None",
        "test_write_to_a_value[floats_multiplied_into_halves-forward": "its twin is differentiated",
    },
    "tracing/test_writes_through_views.py": {
        "test_write_through_a_view[as_strided-forward": _SCATTER,
        "test_write_through_a_view[permute_of_a_returned_view-tangents": _LATE_VIEW,
        "test_write_through_a_view[squeeze_of_a_returned_view-tangents": _LATE_VIEW,
        "test_write_through_a_view[view_returned_after_its_base_changed-tangents": _LATE_VIEW,
    },
    "tracing/test_writes_to_out.py": {
        "test_write_to_out[two_results": "the second result of an out= operator is taken from the first",
        "test_write_to_out[empty_tensor_that_grows": "a result is expanded to the size before the write",
    },
    "tracing/test_writes_to_state.py": {
        "test_reassigned_buffer_is_an_output": _WARNING,
        "test_write_to_state[buffer_reassigned": _WARNING,
        "test_write_to_state[buffer_written_and_then_reassigned": "the history ends before the reassignment",
        "test_write_to_state[view_of_a_buffer_returned_after_a_write-tangents": _LATE_VIEW,
        "test_write_to_state[view_of_an_input_returned_after_a_write-tangents": _LATE_VIEW,
    },
    "tracing/test_no_trace.py": {
        "test_what_a_forward_changes_is_changed_back[write_through_data": "`x.data =` makes it fake",
    },
    "tracing/test_checkpoints.py": {
        "test_checkpoint_around_a_running_average": "what a recomputation writes to state is lost",
        "test_checkpoint_that_draws_new_numbers": "a recomputation always uses the first numbers",
        "test_reentrant_checkpoint_in_the_backward_is_refused": _OTHER_ERROR,
    },
    "tracing/test_call_sites.py": {
        "test_module_with_two_names_has_the_one_it_was_reached_by[nested": "the newest access names it",
    },
    "tracing/test_bad_calls.py": {"test_uninitialized_parameters": "lazy modules are not told apart"},
    "tracing/test_bad_losses.py": {"test_error_in_the_loss_is_not_blamed_on_a_module": _LOSS},
    "tracing/test_own_errors.py": {"test_note_of_a_loss_names_no_module": _LOSS},
    "tracing/test_data_dependent.py": {
        "test_value_needed[tolist of a buffer": _OTHER_ERROR,
        "test_value_needed[format": _OTHER_ERROR,
    },
    "program/test_convention.py": {"test_unknown_container_is_named": "an unknown object is printed in full"},
    "program/test_wellformed.py": {"test_broken_program_is_refused[place_unknown": "places are not checked"},
    "reports/test_verification.py": {
        "test_verify_leaves_no_trace[adding": _WARNING,
        "test_verify_leaves_no_trace[requiring": _FLAGS,
        "test_verify_leaves_no_trace[freezing": _FLAGS,
        "test_meta_model_cannot_be_verified": "an error while values are restored leaves seeds and gradients",
    },
    "hierarchy/test_hooks.py": {
        "test_hook_that_replaces_the_result_is_differentiated_or_refused[True": "the backward ignores it",
    },
    "hierarchy/test_training.py": {
        "test_gradient_through_an_input_that_is_written": "an input with a history is captured as a leaf",
        "test_input_in_any_layout[expanded-contiguous": _EXPANDED,
        "test_input_in_any_layout[expanded-transposed": _EXPANDED,
        "test_input_in_any_layout[expanded-every other": _EXPANDED,
    },
    "hierarchy/test_alone.py": {
        **{f"test_submodules_of_a_forward_tree[{name}]": _EXPANDED for name in ("bert", "t5", "vit")},
        **{f"test_submodules_of_a_joint_tree[{name}]": _EXPANDED for name in ("bert", "t5", "vit")},
        **{f"test_submodules_of_a_tree_with_tangents[{name}]": _EXPANDED for name in ("bert", "t5", "vit")},
        "test_submodules_of_a_joint_tree[diffusion_transformer": _LAID_OUT,
        "test_submodules_of_a_tree_with_tangents[diffusion_transformer": _LAID_OUT,
        "test_submodules_of_a_forward_tree[inplace_activations": _WRITTEN,
        "test_submodules_of_a_joint_tree[inplace_activations": _WRITTEN,
        "test_submodules_of_a_tree_with_tangents[inplace_activations": _WRITTEN,
        "test_submodules_of_a_joint_tree[weight_norm": _STATE,
        "test_submodules_of_a_joint_tree[spectral_norm": _STATE,
        "test_submodules_of_a_tree_with_tangents[weight_norm": _STATE,
        "test_submodules_of_a_tree_with_tangents[spectral_norm": _STATE,
        "test_argument_that_nothing_uses": "an absent argument fits nothing",
        "test_later_call_that_differentiates_its_input": "the first call that fits is taken",
        "test_module_after_a_write_through_a_view": "what is written through a view is no argument",
        "test_module_before_a_write_through_a_view": "a result that is written through a view is absent",
        "test_module_that_makes_a_constant": "literals are kept at the root alone",
    },
    "hierarchy/test_state.py": {
        "test_reassigned_buffer_moves_on": _WARNING,
        "test_buffer_may_have_any_name[bodies": _ATTRIBUTE,
        "test_buffer_may_have_any_name[calls": _ATTRIBUTE,
        "test_child_may_have_any_name[bodies": _ATTRIBUTE,
        "test_child_may_have_any_name[calls": _ATTRIBUTE,
    },
    "test_table.py": {"test_tree_is_eager[segformer-tangents": _LAID_OUT},
}


def known_bug(node_id: str) -> str | None:
    """Why a test is expected to fail, or None."""
    file, _, name = node_id.removeprefix("tests/").partition("::")
    return next((cause for start, cause in KNOWN_BUGS.get(file, {}).items() if name.startswith(start)), None)
