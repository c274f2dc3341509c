"""Canaries: what we rely on behind `torch.compiler.is_compiling()`."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from whence._torch.observe.compile_flags import (
    compiled_functions_run_eagerly,
    compiler_reading,
    compiling_on_this_thread,
    constant_to_tracers,
    unread,
)

QUESTIONS: list[Callable[[], bool]] = [torch.compiler.is_compiling, torch.compiler.is_exporting]


@pytest.mark.parametrize(
    "question", QUESTIONS, ids=lambda question: f"{question.__module__}.{question.__name__}"
)
def test_answer_is_true_inside(question: Callable[[], bool]) -> None:
    """Every way to ask is answered by the two flags."""
    assert not question()
    with compiling_on_this_thread(lambda: True):
        assert question()
    assert not question()


def test_dynamo_is_not_told() -> None:
    """`torch.compiler.is_dynamo_compiling()` is another question, and its answer stays no."""
    with compiling_on_this_thread(lambda: True):
        assert not torch.compiler.is_dynamo_compiling()


def test_other_threads_are_not_told() -> None:
    """Another thread is told no meanwhile."""
    answers: list[bool] = []
    with compiling_on_this_thread(lambda: True):
        thread = threading.Thread(target=lambda: answers.extend(bool(question()) for question in QUESTIONS))
        thread.start()
        thread.join()
    assert answers == [False] * len(QUESTIONS)


def test_asking_is_noticed() -> None:
    """Whoever asks on this thread is noticed."""
    asked = []

    def interesting() -> bool:
        asked.append(1)
        return True

    with compiling_on_this_thread(interesting):
        for _ in range(3):
            assert torch.compiler.is_compiling()
    assert len(asked) == 3


def test_the_answer_is_the_listener_s() -> None:
    """Code is told what the listener says; a flag that is up already stays up."""
    with compiling_on_this_thread(lambda: False):
        assert [bool(question()) for question in QUESTIONS] == [False] * len(QUESTIONS)
        with compiling_on_this_thread(lambda: True):
            assert all(question() for question in QUESTIONS)
    with compiling_on_this_thread(lambda: True), compiling_on_this_thread(lambda: False):
        assert all(question() for question in QUESTIONS)


def test_uninteresting_asker_is_not_reported_again() -> None:
    """Code that was said not to count is told yes, and reported once."""
    asked = []

    def uninteresting() -> None:
        asked.append(1)

    with compiling_on_this_thread(uninteresting):
        for _ in range(3):
            assert torch.compiler.is_compiling()
    assert len(asked) == 1


@pytest.mark.canary("torch.compiler._is_compiling_flag", "torch.compiler._is_exporting_flag")
def test_flags_come_back() -> None:
    """Afterwards, and after an error, the flags are what they were."""
    before = (torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag)
    with pytest.raises(KeyError), compiling_on_this_thread(lambda: True):
        raise KeyError
    assert (torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag) == before == (False, False)


@pytest.mark.parametrize(
    ("combined", "expected"),
    [
        pytest.param(lambda flag: flag or False, True, id="or"),
        pytest.param(lambda flag: flag | False, True, id="|"),
        pytest.param(lambda flag: False | flag, True, id="| from the right"),
        pytest.param(lambda flag: flag & False, False, id="&"),
        pytest.param(lambda flag: True & flag, True, id="& from the right"),
        pytest.param(lambda flag: not flag, False, id="not"),
        pytest.param(lambda flag: flag == True, True, id="=="),  # noqa: E712 - the way some library code asks
    ],
)
def test_flag_combines_like_a_truth_value(combined: Callable[[object], object], expected: bool) -> None:
    """The object in the flags' place works in the expressions that PyTorch writes."""
    with compiling_on_this_thread(lambda: True):
        assert bool(combined(torch.compiler._is_compiling_flag)) is expected


@pytest.mark.canary("torch._dynamo.eval_frame._stance", "torch._higher_order_ops.utils._in_hop_compile")
def test_compiled_functions_run_their_python() -> None:
    """Compiled functions ask `torch._dynamo.eval_frame._stance`, and on this thread run eagerly."""
    calls: list[str] = []

    def double(x: torch.Tensor) -> torch.Tensor:
        calls.append("python")
        return x * 2

    compiled = torch.compile(double, backend="eager", fullgraph=True)
    with compiled_functions_run_eagerly():
        for _ in range(2):
            compiled(torch.ones(2))
        assert torch._dynamo.eval_frame._stance.stance == "force_eager"
        elsewhere: list[str] = []
        thread = threading.Thread(target=lambda: elsewhere.append(torch._dynamo.eval_frame._stance.stance))
        thread.start()
        thread.join()
    assert calls == ["python"] * 2
    assert elsewhere == ["default"]
    assert torch._dynamo.eval_frame._stance.stance == "default"


@pytest.mark.canary("torch._C._dynamo.eval_frame.get_eval_frame_callback")
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")
def test_functions_that_a_compiler_reads_in_passing() -> None:
    """Below a graph break whatever runs next is read; outside of compiled code nothing is."""
    seen: list[bool] = []

    def looks(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        seen.append(torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None)
        seen.append(torch.compiler.disable(lambda: compiler_reading() is not None)())
        seen.append(unread(lambda: compiler_reading() is not None))
        return x + 1

    torch.compile(looks, backend="eager")(torch.ones(2))
    assert seen == [True, False, False]
    assert compiler_reading() is None
    assert unread(max, 1, 2) == 2


@pytest.mark.canary("torch._dynamo.eval_frame.DisableContext._torchdynamo_disable_msg")
def test_what_is_not_read_says_why() -> None:
    """Where the whole of a function is to be read, the error names the reason, and what to do."""

    def adds(x: torch.Tensor) -> torch.Tensor:
        return unread(torch.add, x, 1) * 2

    told = r"does not read; leave out fullgraph=True, or call it outside"
    with pytest.raises(torch._dynamo.exc.Unsupported, match=told):
        torch.compile(adds, fullgraph=True, backend="eager")(torch.zeros(1))
    assert torch.compile(adds, backend="eager")(torch.zeros(1)).item() == 2


@pytest.mark.canary("torch._dynamo.variables.functions.UserFunctionVariable._dynamo_marked_constant")
def test_constants_are_not_traced() -> None:
    """What a function returns while code is traced is a constant to the compiler."""
    calls: list[int] = []

    @constant_to_tracers
    def number(of: int) -> int:
        calls.append(of)
        return of + 1

    def adds(x: torch.Tensor) -> torch.Tensor:
        return x + number(2)

    compiled = torch.compile(adds, fullgraph=True, backend="eager")
    assert compiled(torch.zeros(1)).item() == compiled(torch.zeros(1)).item() == 3
    assert calls == [2]
    assert number(4) == 5


@pytest.mark.canary("torch._subclasses")
@pytest.mark.parametrize("told", [True, False])
def test_who_asks_for_fake_tensors_is_told(told: bool) -> None:
    """Code that is not torch's; real tensors are no fakes, and behind the block all is as it was."""
    before = torch._subclasses
    fake = FakeTensorMode().from_tensor(torch.ones(2))

    def asks(thing: object) -> bool:
        return isinstance(thing, torch._subclasses.FakeTensor)

    with compiling_on_this_thread(lambda: told):
        assert asks(fake) is told and issubclass(type(fake), torch._subclasses.FakeTensor) is told
        assert not asks(torch.ones(2))
        assert isinstance(fake, torch._subclasses.fake_tensor.FakeTensor)
    assert asks(fake) and torch._subclasses is before


def test_other_threads_see_fake_tensors_as_they_are() -> None:
    """Also where a thread that began later is told something else."""
    fake = FakeTensorMode().from_tensor(torch.ones(2))
    found: list[bool] = []
    with compiling_on_this_thread(lambda: False):
        asking = threading.Thread(target=lambda: found.append(isinstance(fake, torch._subclasses.FakeTensor)))
        asking.start()
        asking.join()
    assert found == [True]
