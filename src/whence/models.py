"""Find the model a command line names: `package.module:factory` or `hf:Architecture(option=value)`."""

import ast
import importlib
import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from whence._torch.pytrees import tree_flatten
from whence.errors import UsageError

HUGGING_FACE = "hf:"
BATCH, LENGTH = 2, 16


@dataclass(frozen=True)
class NamedModel:
    """A model with example inputs, and the loss a training step would use."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], Tensor]


def load(name: str) -> NamedModel:
    """The model of that name; raises `UsageError` in one sentence when it cannot be found or built."""
    if name.startswith(HUGGING_FACE):
        return _from_transformers(name.removeprefix(HUGGING_FACE))
    return _from_factory(name)


def called(name: str) -> Callable[..., Any]:
    """The function of that name, `package.module:function`; raises `UsageError` where there is none."""
    module_name, _, function_name = name.partition(":")
    found = getattr(imported(module_name), function_name, None)
    if found is None:
        raise UsageError(f"{module_name} has no {function_name}")
    if not callable(found):
        raise UsageError(f"{name} is a {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return]


def imported(name: str) -> ModuleType:
    """A module, also one of the working directory; raises `UsageError` where there is none."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f"cannot import {name}: {error}") from error
    finally:
        sys.path.pop(0)


def _from_factory(name: str) -> NamedModel:
    if not all(name.partition(":")):
        raise UsageError(
            f"{name!r} does not name a model",
            remedy="write package.module:factory, or hf:Architecture(option=value)",
        )
    factory = called(name)
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise UsageError(
            f"{name} needs arguments, and a factory takes none: {error}",
            remedy="write a function around it that makes the arguments",
        ) from error
    return _with_inputs(name, factory())


def _with_inputs(name: str, made: Any) -> NamedModel:
    match made:
        case (nn.Module() as model, tuple() as args, dict() as kwargs):
            return NamedModel(model, args, kwargs, mean_square)
        case (nn.Module() as model, tuple() as args):
            return NamedModel(model, args, {}, mean_square)
        case (nn.Module() as model, dict() as kwargs):
            return NamedModel(model, (), kwargs, mean_square)
        case nn.Module() as model if hasattr(model, "main_input_name"):
            return _with_example(model)
    raise UsageError(
        f"{name} returned a {type(made).__name__} without example inputs",
        remedy="return (module, args) or (module, args, kwargs)",
    )


def mean_square(outputs: Any) -> Tensor:
    """`outputs.loss` if there is one; otherwise the mean square of every floating-point output."""
    loss = getattr(outputs, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    leaves, _ = tree_flatten(outputs)
    parts = [
        leaf.float().pow(2).mean() for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]
    if not parts:
        raise UsageError("the model returns no floating-point tensor to make a loss from")
    return torch.stack(parts).sum()


def _from_transformers(expression: str) -> NamedModel:
    architecture, options = _parsed(expression)
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise UsageError("hf: models need transformers", remedy="pip install transformers") from error
    model_class = getattr(transformers, architecture, None)
    config_class = getattr(model_class, "config_class", None)
    if model_class is None or config_class is None:
        raise UsageError(f"transformers has no model called {architecture}")
    torch.manual_seed(0)
    _check_options(config_class, options)
    with _AsUsageError(f"{architecture} cannot be built from these options"):
        return _with_example(model_class(config_class(**options)).eval())


def _check_options(config_class: Any, options: dict[str, Any]) -> None:
    """A configuration takes any keyword and keeps it; one it does not have is a slip of the pen."""
    with _AsUsageError(f"{config_class.__name__} cannot be built"):
        known = config_class()
    unknown = [name for name in options if not hasattr(known, name)]
    if unknown:
        raise UsageError(f"{config_class.__name__} has no option {', '.join(unknown)}")


class _AsUsageError(AbstractContextManager[None]):
    """Whatever a library raises about the options it was given is the user's mistake, in one sentence."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, Exception):
            raise UsageError(f"{self._what}: {' '.join(str(error).split())}") from error


def _parsed(expression: str) -> tuple[str, dict[str, Any]]:
    try:
        tree = ast.parse(expression, mode="eval").body
        match tree:
            case ast.Name(id=name):
                return name, {}
            case ast.Call(func=ast.Name(id=name), args=[], keywords=keywords) if all(k.arg for k in keywords):
                return name, {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in keywords}
    except (SyntaxError, ValueError) as error:
        raise _unreadable(expression) from error
    raise _unreadable(expression)


def _unreadable(expression: str) -> UsageError:
    return UsageError(f"cannot read {expression!r}", remedy="write hf:Architecture(option=value)")


def _with_example(model: Any) -> NamedModel:
    generator = torch.Generator().manual_seed(0)
    kwargs = _example_inputs(model, model.config, generator)
    return NamedModel(model, (), kwargs, mean_square)


def _example_inputs(model: Any, config: Any, generator: torch.Generator) -> dict[str, Any]:
    """Inputs by the model's main input; sizes from its configuration."""
    match model.main_input_name:
        case "pixel_values":
            inputs = {"pixel_values": _images(_part_of_config(config, "vision_config"), generator)}
        case "input_features":
            frames = 2 * getattr(config, "max_source_positions", 50)
            inputs = {"input_features": torch.randn(BATCH, config.num_mel_bins, frames, generator=generator)}
        case "input_values":
            inputs = {"input_values": torch.randn(BATCH, 4000, generator=generator)}
        case _:
            inputs = {"input_ids": _ids(_part_of_config(config, "text_config"), generator)}
    if hasattr(config, "text_config") and hasattr(config, "vision_config"):
        inputs |= {
            "input_ids": _ids(config.text_config, generator),
            "pixel_values": _images(config.vision_config, generator),
        }
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = _ids(config, generator)
    if "input_ids" in inputs and type(model).__name__.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM")):
        inputs["labels"] = inputs["input_ids"]
    if hasattr(config, "use_cache"):
        return {**inputs, "use_cache": False}
    return inputs


def _part_of_config(config: Any, name: str) -> Any:
    return getattr(config, name, config)


def _ids(config: Any, generator: torch.Generator) -> Tensor:
    length = min(LENGTH, getattr(config, "max_position_embeddings", LENGTH))
    return torch.randint(3, config.vocab_size, (BATCH, length), generator=generator)


def _images(config: Any, generator: torch.Generator) -> Tensor:
    size = getattr(config, "image_size", 224)
    height, width = (size, size) if isinstance(size, int) else size
    return torch.randn(BATCH, getattr(config, "num_channels", 3), height, width, generator=generator)
