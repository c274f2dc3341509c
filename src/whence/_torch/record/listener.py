"""What a recording tells, and asks."""

from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Protocol

from torch import Tensor, fx

from whence._torch.tensor_questions import Answer
from whence.errors import Place
from whence.schema import TensorFact


class Branching(Protocol):
    """What happens to operators that run functions."""

    def called(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model calls such an operator; give what it returns."""

    def rule_for(self, operator: Any) -> Callable[..., Any] | None:
        """What records an operator in the place of PyTorch's own rule."""

    def traced(self, function: Any, args: tuple[Any, ...]) -> fx.GraphModule:
        """The graph of a function that an operator runs on these arguments."""

    def refused(self, operator: Any, why: str, remedy: str = ...) -> Exception:
        """An operator cannot be recorded; make the error to raise."""

    def composed(self, operator: Any, tensor: Tensor) -> Exception:
        """An operator got a tensor that is made of others; make the error to raise."""


class ModelListener(Protocol):
    """What is told, and asked, of the model that runs, whichever of its functions is being recorded."""

    @property
    def branches(self) -> Branching:
        """Who is told of operators that run functions."""

    def required(self, condition: str) -> str:
        """The model states a condition for every run; what one says where it does not hold."""

    def stated(self, branching: FrameType | None = None, *, called: bool) -> tuple[bool, str] | None:
        """What a truth that Python asks for has to be for the model not to raise, and what a run says else.

        `branching` is the code that asks, the innermost that is not ours by default; `called` says that it
        called a function for the truth.
        """

    def here(self) -> Place:
        """The module that is running and the user's line."""

    def reading(self) -> object:
        """Where the model is now."""

    def value_needed(self, operation: object, arguments: Sequence[Any], function: object) -> Exception:
        """Python asked for a tensor's value; make the error to raise.

        `function` is what the model called; `operation`, on these arguments, is what needs the value.
        """

    def requires_set(self, tensor: Tensor, wanted: bool) -> None:
        """The model says whether a tensor requires a gradient."""

    def asked(self, tensor: Tensor, fact: TensorFact) -> None:
        """Python asks something of a tensor."""

    def input_asked(self, question: str, tensor: Tensor) -> Answer | None:
        """The model asks something of a tensor; what it is told where that is an argument of its own."""

    def leaf_written(self, values: Sequence[Any]) -> None:
        """Autograd refuses to write to one of these: raises, where that is no leaf in eager mode."""

    def mode_asked(self, name: str) -> None:
        """Python asks how a mode of torch is."""

    def differentiated(self, tensor: Tensor) -> None:
        """The model asks autograd for the gradient of a tensor: raises, where others have hooks on that."""

    def gradient_asked(self, tensor: Tensor) -> None:
        """Python reads `tensor.grad`."""

    def memory_asked(self, tensor: Tensor, function: Any) -> None:
        """Python asks where a tensor lies in memory: raises, where that is the user's code."""

    def made_contiguous(self, tensor: Tensor) -> None:
        """Python made a tensor contiguous that was so already."""

    def taken_apart(self, composite: Any) -> None:
        """What a composite is made of in the grad mode of now is recorded in its place."""

    def dtype_asked(self) -> None:
        """Python asks a tensor for its dtype."""

    def distrusted(self, reason: str) -> None:
        """The model does something that is another thing where calls are replayed."""

    def stops_gradients(self) -> bool:
        """Whether the model itself has turned gradients off here."""

    def composite_opened(self) -> Exception:
        """An operation got a tensor from inside a composite that is kept whole; make the error to raise."""

    def composed_met(self, tensor: Tensor) -> None:
        """A tensor that is made of others reached an operation; raises where its gradient would be lost."""


class RecordingListener(Protocol):
    """What is told while a recording goes on, of the model or of a function in it."""

    @property
    def model(self) -> ModelListener:
        """Who is told of the model."""

    def recorded(self, node: fx.Node, of: fx.Node | None = None) -> None:
        """A node was appended to the graph; perhaps it is a result `of` another, appended just before."""

    def size_recorded(self, node: fx.Node) -> None:
        """A node that holds a size was appended to the graph."""

    def user_of_sizes(self) -> object:
        """Who is being recorded: what it computes of sizes is its own."""

    def met_tensor(self, tensor: Tensor) -> str:
        """A real tensor nobody announced reached an operation; give it a placeholder name."""

    def made_of_numbers(self, name: str) -> None:
        """The tensor of that name is one that the model has just made of numbers."""

    def hook_registered(self, tensor: Tensor, hook: object) -> None:
        """The model puts a gradient hook on a tensor while it runs."""
