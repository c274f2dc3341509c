"""Published peaks of devices: what an operation could take at least, by a roofline.

Williams, Waterman, Patterson: Roofline: an insightful visual performance model (2009). An operation takes as
long as the slower of two needs: its FLOPs at the peak of its dtype, its bytes at the bandwidth of memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from whence.errors import UsageError

_TERA, _GIGA = 10**12, 10**9


@dataclass(frozen=True)
class Device:
    """Peaks of a device: FLOP/s of dense matrix products by dtype, bytes/s of its memory, and who says so."""

    name: str
    flops: Mapping[str, float]
    bandwidth: float
    source: str = "given by hand"

    def seconds(self, flops: int, moved: int, dtype: str) -> float:
        """The least time for one operation on matrices of a dtype; one without a peak has that of float32."""
        peak = self.flops.get(dtype, self.flops["float32"])
        return max(flops / peak, moved / self.bandwidth)


_EIGHT = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")


def _device(
    name: str, half: float, single: float, bandwidth: float, source: str, eighth: float | None = None
) -> Device:
    flops = {"float16": half * _TERA, "bfloat16": half * _TERA, "float32": single * _TERA}
    flops |= dict.fromkeys(_EIGHT, eighth * _TERA) if eighth is not None else {}
    return Device(name, flops, bandwidth * _GIGA, source)


DEVICES = {
    device.name: device
    for device in (
        _device("a100", 312, 19.5, 2039, "NVIDIA A100 Tensor Core GPU datasheet (SXM, 80 GB)"),
        _device("h100", 989, 67, 3350, "NVIDIA H100 Tensor Core GPU datasheet (SXM)", 1979),
        _device("h200", 989, 67, 4800, "NVIDIA H200 Tensor Core GPU datasheet (SXM)", 1979),
        _device("mi300x", 1307, 163.4, 5300, "AMD Instinct MI300X accelerator datasheet", 2614),
    )
}
"""Dense peaks without sparsity; float32 is that of plain units, not of TF32."""


def device_of(device: str | Device | None) -> Device | None:
    """A device by its name, or as it is; raises `UsageError` for a name that is not listed."""
    if device is None or isinstance(device, Device):
        return device
    if device not in DEVICES:
        raise UsageError(
            f"no peaks are listed for {device!r}",
            remedy=f"name one of {', '.join(DEVICES)}, or give a whence.reports.devices.Device of your own",
        )
    return DEVICES[device]
