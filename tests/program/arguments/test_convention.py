from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence


class Flexible(nn.Module):
    """Takes a batch, a scale that has a default, a flag, and more tensors by position or keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(
        self, batch: Tensor, scale: float = 2.0, *rest: Tensor, flip: bool = False, **named: Tensor
    ) -> Tensor:
        hidden = self.layer(batch) * scale
        for tensor in (*rest, *named.values()):
            hidden = hidden + tensor
        return hidden.flip(0) if flip else hidden


class Structured(nn.Module):
    """Takes a dictionary of a tensor and a list."""

    def forward(self, batch: dict[str, Any]) -> Tensor:
        return batch["features"] + batch["more"][0] * batch["more"][1]


BATCH, FIRST, SECOND = torch.randn(3, 4), torch.randn(3, 4), torch.randn(3, 4)


def flexible(*args: Any, **kwargs: Any) -> tuple[nn.Module, whence.Tree]:
    """The model and its captured module, called in this way at capture."""
    model = Flexible()
    return model, whence.capture(model, args, kwargs).module()


def structured() -> whence.Tree:
    batch = {"features": BATCH, "more": [FIRST, SECOND]}
    return whence.capture(Structured(), (batch,)).module()


def refused(module: nn.Module, *args: Any, **kwargs: Any) -> str:
    """The message with which a call is refused."""
    with pytest.raises(whence.CallError) as caught:
        module(*args, **kwargs)
    return str(caught.value)


def test_keywords_in_any_order() -> None:
    """The order in which keywords are written does not matter."""
    model, module = flexible(BATCH, first=FIRST, second=SECOND)
    assert torch.equal(module(BATCH, second=SECOND, first=FIRST), model(BATCH, first=FIRST, second=SECOND))


def test_positional_as_keyword() -> None:
    """What was given by position at capture may be given by keyword."""
    model, module = flexible(BATCH, 3.0)
    assert torch.equal(module(batch=BATCH, scale=3.0), model(BATCH, 3.0))
    assert torch.equal(module(BATCH, scale=3.0), model(BATCH, 3.0))


def test_keyword_as_positional() -> None:
    """What was given by keyword at capture may be given by position."""
    model, module = flexible(batch=BATCH, scale=3.0)
    assert torch.equal(module(BATCH, 3.0), model(BATCH, 3.0))


def test_default_written_out() -> None:
    """An argument left at its default at capture may be written out."""
    model, module = flexible(BATCH)
    assert torch.equal(module(BATCH, 2.0, flip=False), model(BATCH))


def test_default_left_out() -> None:
    """A default written out at capture may be left out."""
    model, module = flexible(BATCH, 2.0, flip=False)
    assert torch.equal(module(BATCH), model(BATCH))


def test_equal_default_written_out() -> None:
    """A default is recognised by its value, not by being the same object."""
    model, module = flexible(BATCH)
    assert torch.equal(module(BATCH, float("2.0")), model(BATCH))


def test_variable_positionals() -> None:
    """The members of `*args` are arguments like any other."""
    model, module = flexible(BATCH, 2.0, FIRST, SECOND)
    assert torch.equal(module(BATCH, 2.0, FIRST, SECOND), model(BATCH, 2.0, FIRST, SECOND))


def test_fewer_variable_positionals() -> None:
    """A missing member of `*args` is another structure."""
    _, module = flexible(BATCH, 2.0, FIRST, SECOND)
    message = refused(module, BATCH, 2.0, FIRST)
    assert "expected (f32[3, 4], 2.0, f32[3, 4], f32[3, 4]), got (f32[3, 4], 2.0, f32[3, 4])" in message


def test_missing_argument() -> None:
    """A call without a required argument says what Python would say, and the signature."""
    _, module = flexible(BATCH)
    message = refused(module)
    assert "missing a required argument: 'batch'" in message
    assert "scale: float = 2.0" in message


def test_unknown_keyword() -> None:
    """A keyword that was not there at capture is another structure."""
    _, module = flexible(BATCH)
    assert "third=f32[3, 4]" in refused(module, BATCH, third=FIRST)


def test_wrong_shape() -> None:
    """A tensor of another shape says which argument, what it was and what it is."""
    _, module = flexible(BATCH)
    assert "args[0] was f32[3, 4] at capture, is f32[5, 4]" in refused(module, torch.randn(5, 4))


def test_wrong_dtype() -> None:
    """A tensor of another dtype says which argument, what it was and what it is."""
    _, module = flexible(BATCH)
    assert "args[0] was f32[3, 4] at capture, is f64[3, 4]" in refused(module, BATCH.double())


def test_changed_constant() -> None:
    """A number that was burnt into the graph cannot change."""
    _, module = flexible(BATCH, 3.0)
    assert "args[1] was 3.0 at capture, is 4.0" in refused(module, BATCH, 4.0)


def test_constant_of_another_type() -> None:
    """`True` is not `1` and `3` is not `3.0`, although Python calls them equal."""
    _, module = flexible(BATCH, 3.0)
    assert "args[1] was 3.0 at capture, is 3" in refused(module, BATCH, 3)


def test_changed_default() -> None:
    """A default that was burnt into the graph cannot be given another value."""
    _, module = flexible(BATCH)
    refused(module, BATCH, 4.0)


def test_flag_turned() -> None:
    """A flag that decided a branch at capture cannot be turned."""
    _, module = flexible(BATCH, flip=True)
    assert "kwargs['flip'] was True at capture, is False" in refused(module, BATCH, flip=False)


def test_tensor_for_a_constant() -> None:
    """A tensor where a number was captured is refused."""
    _, module = flexible(BATCH, 3.0)
    assert "args[1] was 3.0 at capture, is f32[]" in refused(module, BATCH, torch.tensor(3.0))


def test_constant_for_a_tensor() -> None:
    """A number where a tensor was captured is refused."""
    _, module = flexible(BATCH, first=FIRST)
    assert "kwargs['first'] was a tensor f32[3, 4] at capture, is 1.0" in refused(module, BATCH, first=1.0)


def test_every_misfit_is_named() -> None:
    """All arguments that do not fit are reported at once."""
    _, module = flexible(BATCH, 3.0, first=FIRST)
    message = refused(module, torch.randn(5, 4), 4.0, first=FIRST.double())
    assert all(path in message for path in ("args[0]", "args[1]", "kwargs['first']"))


def test_one_tensor_passed_twice() -> None:
    """Two arguments that were one tensor at capture must be one tensor again."""
    model, module = flexible(BATCH, 2.0, BATCH)
    assert torch.equal(module(FIRST, 2.0, FIRST), model(FIRST, 2.0, FIRST))
    assert "args[0] and args[2] were one tensor at capture, and are two now" in refused(
        module, BATCH, 2.0, FIRST
    )


def test_two_tensors_may_become_one() -> None:
    """Two arguments that were two tensors at capture may be one, as long as neither is written."""
    model, module = flexible(BATCH, 2.0, FIRST)
    assert torch.equal(module(BATCH, 2.0, BATCH), model(BATCH, 2.0, BATCH))


def test_written_argument_must_stay_apart() -> None:
    """An argument that the program writes may not be passed twice: eager would see the write in both."""

    class Writing(nn.Module):
        def forward(self, target: Tensor, source: Tensor) -> Tensor:
            target.add_(1.0)
            return target * source

    module = whence.capture(Writing(), (BATCH.clone(), FIRST.clone())).module()
    both = torch.ones(3, 4)
    refused(module, both, both)


def test_ordered_dict_for_dict() -> None:
    """An `OrderedDict` with the same keys is taken for the dictionary of the capture."""
    module = structured()
    batch = OrderedDict(features=BATCH, more=[FIRST, SECOND])
    assert torch.equal(module(batch), module({"features": BATCH, "more": [FIRST, SECOND]}))


def test_dict_in_another_order() -> None:
    """A dictionary whose keys come in another order is refused, because a model may iterate over it."""
    swapped = {"more": [FIRST, SECOND], "features": BATCH}
    assert "got ({'more': [f32[3, 4], f32[3, 4]], 'features': f32[3, 4]})" in refused(structured(), swapped)


@pytest.mark.parametrize(
    "batch",
    [
        {"features": BATCH},
        {"features": BATCH, "more": [FIRST]},
        {"features": BATCH, "more": (FIRST, SECOND)},
        {"features": BATCH, "more": [FIRST, SECOND], "extra": FIRST},
        [BATCH, [FIRST, SECOND]],
        BATCH,
    ],
    ids=["key missing", "shorter list", "tuple for list", "key added", "list for dict", "tensor for dict"],
)
def test_wrong_structure(batch: Any) -> None:
    """Containers of another kind, length or keys are refused, and both structures are shown."""
    message = refused(structured(), batch)
    assert "expected ({'features': f32[3, 4], 'more': [f32[3, 4], f32[3, 4]]}), got (" in message


def test_unknown_container_is_named_by_its_class() -> None:
    """A container that pytree does not know is shown as its class, not by printing the tensors in it."""
    message = refused(structured(), {"features": BATCH, "more": _List([FIRST, SECOND])})
    assert "_List" in message
    assert "tensor(" not in message


class _Holding:
    """Prints what it holds."""

    def __repr__(self) -> str:
        return repr(FIRST)


def test_unknown_object_is_named_by_its_class() -> None:
    """Inside another structure, and in the place of a tensor or a number."""
    module = whence.capture(lambda x, by: x * by, (FIRST, 2)).module()
    for args in ((FIRST, [_Holding()]), (FIRST, _Holding()), (_Holding(), 2)):
        message = refused(module, *args)
        assert "a _Holding" in message
        assert "tensor(" not in message


def test_size_is_taken_as_it_was_given() -> None:
    """A `torch.Size` given at capture fits the same `torch.Size` later."""

    class Reshaping(nn.Module):
        def forward(self, batch: Tensor, size: torch.Size) -> Tensor:
            return batch.view(size)

    module = whence.capture(Reshaping(), (BATCH, torch.Size([12]))).module()
    assert torch.equal(module(BATCH, torch.Size([12])), BATCH.view(12))


def test_a_sparse_tensor_where_memory_is_read() -> None:
    """A tensor without strides is refused in words where the program looks at strides."""

    class Reading(nn.Module):
        def forward(self, batch: Tensor) -> Tensor:
            return torch.as_strided(batch, (2, 2), (1, 4))

    module = whence.capture(Reading(), (BATCH,)).module()
    message = "had strides (4, 1) at capture, has the layout torch.sparse_coo; the program reads memory"
    assert message in refused(module, BATCH.to_sparse())


class _List(list[Tensor]):
    """A list that pytree does not know."""


def test_call_error_is_python_s_own_too() -> None:
    """Code that expects a `TypeError` or `ValueError` from a wrong call keeps working."""
    _, module = flexible(BATCH)
    for kind in (TypeError, ValueError):
        with pytest.raises(kind):
            module(BATCH.double())


def test_function_without_parameters() -> None:
    """A callable that takes nothing is captured and called with nothing."""
    layer, batch = nn.Linear(4, 4), torch.randn(3, 4)
    module = whence.capture(lambda: layer(batch)).module()
    assert torch.equal(module(), layer(batch))


def test_builtin_without_a_python_signature() -> None:
    """A builtin has no signature to bind to, and is called as it was captured."""
    module = whence.capture(torch.relu, (BATCH,)).module()
    assert torch.equal(module(BATCH), torch.relu(BATCH))


def test_verify_checks_its_inputs() -> None:
    """Verifying on inputs that do not fit the capture is refused, not answered."""
    model = Flexible()
    with pytest.raises(whence.CallError, match=r"args\[0\] was"):
        whence.capture(model, (BATCH,)).verify(model, (torch.randn(5, 4),))
