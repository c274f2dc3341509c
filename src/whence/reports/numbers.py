"""Numbers as a person reads them."""

_SCALE = (" ", "k", "M", "G", "T", "P")


def scaled(value: float) -> str:
    """Three digits and a power of a thousand: `1.23 M`."""
    for unit in _SCALE:
        if abs(value) < 999.5 or unit == _SCALE[-1]:
            return f"{value:.3g} {unit}".replace("  ", " ")
        value /= 1000
    return str(value)
