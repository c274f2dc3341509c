"""What a capture can be asked for."""

from whence.errors import Fault

_ON_VALUES = "PyTorch's bytecode front end runs nothing on the example's values"
_ON_TENSORS = "PyTorch's bytecode front end runs on the device of the tensors"
_FLAT = "the backward is traced from the modules of the strict program, which pass flat values"
_OTHERWISE = "capture with strict=False"


def option_faults(
    backward: object, strict: bool, patterns: tuple[str, ...], decide: object, device: object = None
) -> list[Fault]:
    """What is wrong with the options of a capture."""
    of_backward = [] if isinstance(backward, bool) or callable(backward) else [_of_backward(backward)]
    of_decide = decide_faults(decide)
    with_backward = "preserve_calls does not work with strict=True and a backward"
    rows = (
        (backward and patterns, with_backward, _FLAT, f"{_OTHERWISE}, or the forward alone"),
        (decide and not of_decide, "decide does not work with strict=True", _ON_VALUES, _OTHERWISE),
        (device is not None, "device does not work with strict=True", _ON_TENSORS, _OTHERWISE),
    )
    of_strict = [Fault(what, why=why, remedy=remedy) for holds, what, why, remedy in rows if strict and holds]
    return [*of_backward, *of_decide, *of_strict]


def _of_backward(backward: object) -> Fault:
    return Fault(f"backward cannot be {backward!r}", remedy="use False, True or a function of the outputs")


def decide_faults(decide: object) -> list[Fault]:
    """What is wrong with who is to decide by values."""
    if decide in (None, "example"):
        return []
    return [Fault(f"decide cannot be {decide!r}", remedy="use 'example', or None to refuse such a model")]
