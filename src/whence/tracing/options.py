"""What a capture can be asked for."""

from whence.errors import Fault


def option_faults(
    backward: object, strict: bool, patterns: tuple[str, ...], decide: object, device: object = None
) -> list[Fault]:
    """What is wrong with the options of a capture."""
    faults = [*_backward_faults(backward), *_preserve_faults(strict, bool(backward), patterns)]
    return [*faults, *decide_faults(decide, strict), *_device_faults(strict, device)]


def _device_faults(strict: bool, device: object) -> list[Fault]:
    if not strict or device is None:
        return []
    why = "PyTorch's bytecode front end runs on the device of the tensors"
    return [Fault("device does not work with strict=True", why=why, remedy="capture with strict=False")]


def decide_faults(decide: object, strict: bool = False) -> list[Fault]:
    """What is wrong with who is to decide by values."""
    if decide not in (None, "example"):
        return [Fault(f"decide cannot be {decide!r}", remedy="use 'example', or None to refuse such a model")]
    if decide is None or not strict:
        return []
    why = "PyTorch's bytecode front end runs nothing on the example's values"
    return [Fault("decide does not work with strict=True", why=why, remedy="capture with strict=False")]


def _backward_faults(backward: object) -> list[Fault]:
    if isinstance(backward, bool) or callable(backward):
        return []
    remedy = "use False, True or a function of the outputs"
    return [Fault(f"backward cannot be {backward!r}", remedy=remedy)]


def _preserve_faults(strict: bool, joint: bool, patterns: tuple[str, ...]) -> list[Fault]:
    if not (strict and joint and patterns):
        return []
    why = "the backward is traced from the modules of the strict program, which pass flat values"
    remedy = "capture with strict=False, or the forward alone"
    return [Fault("preserve_calls does not work with strict=True and a backward", why=why, remedy=remedy)]
