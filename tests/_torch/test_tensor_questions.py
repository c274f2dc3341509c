"""What code asks of a tensor, and what one answers for which a fake one stands."""

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from whence._torch import tensor_questions as questions
from whence._torch.fakes import classes_said_in_eager


def test_answers() -> None:
    """Each question of torch functions has an answer that equality compares, of a view as of a leaf."""
    leaf = torch.ones(3)
    view = leaf[1:]
    for tensor in (leaf, view, torch.ones(2, requires_grad=True) * 2, torch.eye(2).to_sparse()):
        assert all(type(answer) in (bool, int) for answer in questions.all_asked_of(tensor).values())
    asked = questions.all_asked_of(view)
    assert (asked["storage_offset"], asked["_base"], asked["_is_view"]) == (1, False, True)
    assert questions.all_asked_of(leaf.add_(1))["_version"] == 1


def test_attributes() -> None:
    """A fake tensor has the plain attributes of the one whose twin it is, and notes for which code looks."""
    tensor, fake = torch.ones(3), FakeTensorMode().from_tensor(torch.ones(3))
    vars(tensor).update(flag=1, mask=torch.ones(3))
    with classes_said_in_eager():
        questions.with_attributes_of(fake, tensor)
        assert fake.flag == 1  # type: ignore[attr-defined]
        assert not hasattr(fake, "absent")
        with pytest.raises(Exception, match=r"the model looks at \.mask"):
            getattr(fake, "mask")  # noqa: B009
    questions.note_class_asked(fake, (int, nn.Parameter))
    asked = dict(questions.asked_unheard(fake, tensor))
    expected = {"hasattr absent": False, "attribute flag": 1, "attribute mask": "Tensor"}
    assert asked == {"__class__": "Tensor", **expected}
    assert [questions.spelled(question, "x") for question in asked] == [
        "type(x)",
        "hasattr(x, 'absent')",
        "x.flag",
        "x.mask",
    ]


@pytest.mark.parametrize(("kinds", "counts"), [(Tensor, False), (nn.Parameter, True), ((int, float), False)])
def test_classes_that_tell_tensors_apart(kinds: object, counts: bool) -> None:
    """Every tensor is a `Tensor`; whether one is a parameter is a question."""
    fake = FakeTensorMode().from_tensor(torch.ones(3))
    questions.note_class_asked(fake, kinds)
    assert bool(list(questions.asked_unheard(fake, torch.ones(3)))) is counts
