"""Everything that is asked of a program with variants takes them along, or says that it does not."""

import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence
from tests.tracing.test_variants import Branching, captured, other_layer
from whence.program.arguments.variants import alone, fitting, in_words
from whence.rewriting import Decompose

ONE, THREE = (torch.ones(1, 4),), (torch.ones(3, 4),)


def test_the_program_that_fits() -> None:
    """Itself where it admits the arguments, the variant where that alone does, and else itself."""
    _, program = captured(other_layer)
    (variant,) = program.variants
    assert fitting(program, THREE, None) is program and fitting(program, ONE, {}) is variant
    assert fitting(program, (), {}) is program and fitting(program, None, None) is program
    assert in_words(variant.circumstances.numbers) == "batch is 1"
    assert alone(program).variants == () and alone(variant) is variant


CHANGES: dict[str, Any] = {
    "apply": lambda program: program.apply(Decompose()),
    "decompose": lambda program: program.decompose("core"),
    "attributes": lambda program: program.with_state("attributes"),
    "and back": lambda program: program.with_state("attributes").with_state("inputs"),
    "copy": deepcopy,
    "changes": lambda program: program.with_changes(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_of_all(change: str) -> None:
    """What is made of a program is made of its variants, which stay programs of the same model."""
    model, program = captured(other_layer)
    changed = CHANGES[change](program)
    assert [type(each) for each in changed.variants] == [whence.Program]
    assert changed.variants[0].circumstances.numbers == (("batch", 1),)
    assert [entry.name for entry in changed.variants[0].history] == [entry.name for entry in changed.history]
    for args in (ONE, THREE):
        assert changed.verify(model, args).ok or change == "decompose"
        changed.unflatten()(*args)


def test_a_copy_has_tensors_of_its_own_together() -> None:
    """Program and variants of a copy share tensors, none with the model."""
    model, program = captured(other_layer)
    copied = deepcopy(program)
    ours, theirs = (each.state["p_single_weight"] for each in (copied, copied.variants[0]))
    assert ours is theirs and ours is not model.single.weight


def test_a_pass_over_one_graph_says_what_it_leaves() -> None:
    """A block edits one graph, and so the edited program has no variants."""
    _, program = captured(other_layer)
    with pytest.warns(UserWarning, match=r"has none of its 1 variant\(s\)"), program.track("nothing") as edit:
        pass
    assert edit.program.variants == () and len(program.variants) == 1


def test_an_exported_program_says_what_it_leaves() -> None:
    """PyTorch's form has one graph; that of the variant is another."""
    model, program = captured(other_layer)
    with pytest.warns(UserWarning, match=r"without the 1 variant\(s\)"):
        exported = program.to_exported_program()
    assert torch.equal(exported.module()(*THREE), model(*THREE))
    with warnings.catch_warnings():
        assert torch.equal(program.variants[0].to_exported_program().module()(*ONE), model(*ONE))


def test_a_file_has_all(tmp_path: Path) -> None:
    """Loaded with and without the model; tensors are stored once, and shared again."""
    model, program = captured(other_layer, lambda output: output.sin().sum())
    program.save(tmp_path / "p")
    given = {"loss_function": program.loss_function}
    loaded, bound = (whence.load(tmp_path / "p", model=each).under(**given) for each in (None, model))
    for each in (loaded, bound):
        assert each.variants[0].state["p_single_weight"] is each.state["p_single_weight"]
        assert all(each.verify(model, args).ok for args in (ONE, THREE))
        assert str(each.shapes) == str(program.shapes) and str(each) == str(program)
    assert bound.check(model, ONE) == [] and bound.check(model) == []
    assert bound.variants[0].state["p_single_weight"] is model.single.weight
    program.save(tmp_path / "q", weights=False)
    assert (tmp_path / "q").stat().st_size < (tmp_path / "p").stat().st_size
    assert whence.load(tmp_path / "q", model=model).check(model, ONE) == []


def test_guarded_programs_begin_with_all() -> None:
    """Each call runs the path that fits; what changed is said of that one."""
    model, program = captured(other_layer)
    guarded = program.guarded(model)
    assert len(guarded.programs) == 2
    for args in (ONE, THREE, ONE):
        assert torch.equal(guarded(*args), model(*args))
    model.single.eval()
    with pytest.raises(whence.StaleCapture, match=r"single\.training") as stale:
        guarded(*ONE)
    assert len(stale.value.violations) == 1


def test_guarded_programs_capture_all_again() -> None:
    """A recapture asks for variants, too."""
    model, program = captured(other_layer)
    guarded = program.guarded(model, on_violation="recapture")
    model.usual.eval()
    for args in (THREE, ONE):
        assert torch.equal(guarded(*args), model(*args))
    assert len(guarded.programs) == 2 and guarded.program.circumstances.numbers


def test_bound_programs_run_the_one_that_fits() -> None:
    """State and gradients are written as eager writes them."""
    model, program = captured(other_layer, lambda output: output.sin().sum())
    bound, eager = program.bind(model), deepcopy(model)
    for args in (ONE, THREE):
        assert torch.equal(bound(*args)[0], eager(*args).sin().sum())
        eager(*args).sin().sum().backward()
    gradients = [(ours.grad, theirs.grad) for ours, theirs in _pairs(model, eager)]
    assert all(ours is theirs is None or torch.equal(ours, theirs) for ours, theirs in gradients)
    assert model.seen.item() == 2
    with pytest.raises(whence.CallError):
        bound(torch.ones(3, 5))


def _pairs(model: nn.Module, eager: nn.Module) -> Any:
    return zip(model.parameters(), eager.parameters(), strict=True)


def by_an_attribute(model: Branching, x: Tensor) -> Tensor:
    """One row alone asks for an attribute."""
    if x.shape[0] == 1:
        return model.single(x) if model.single.in_features == 4 else model.usual(x)
    return model.usual(x)


def test_guards_are_those_of_all() -> None:
    """What only a variant relied on counts for its calls, and where no call is given."""
    model, program = captured(by_an_attribute)
    model.single.in_features = 5
    assert [row.guard.what for row in program.check(model, ONE)] == ["single.in_features"]
    assert program.check(model, THREE) == []
    assert [row.guard.what for row in program.check(model)] == ["single.in_features"]


def test_values_on_the_way_are_those_of_the_one_that_runs() -> None:
    """What is read is read in the variant."""
    model, program = captured(other_layer)
    values = program.run(ONE, read="single")
    assert torch.equal(values["single"], model.single(*ONE))
    assert program.first(ONE) is None
