"""What a capture can be asked for."""

from whence.errors import Fault


def option_faults(backward: object, strict: bool, patterns: tuple[str, ...]) -> list[Fault]:
    """What is wrong with the options of a capture."""
    return [*_backward_faults(backward), *_preserve_faults(strict, bool(backward), patterns)]


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
