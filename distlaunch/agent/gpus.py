"""GPUs of a node, and their utilization."""

from __future__ import annotations

import os

from distlaunch.agent.procfs import contents, names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def gpu_count() -> int:
    """Count the GPUs that a worker would see, using CUDA_VISIBLE_DEVICES if set, or else the drivers."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        named, present = [device.strip() for device in visible.split(",")], _nvidia_gpus()
        # As in CUDA, the list ends at the first invalid entry.
        wrong = (i for i, device in enumerate(named) if not _is_valid(device, present))
        return next(wrong, len(named))
    return _nvidia_gpus() or _amd_gpus()


def _is_valid(device: str, present: int) -> bool:
    """Return whether an entry of CUDA_VISIBLE_DEVICES may be a GPU. `present` is their number, if known."""
    if device.isdecimal():
        return not present or int(device) < present
    return device not in ("", "-1", "NoDevFiles")  # the last is Slurm's word for none


def _nvidia_gpus() -> int:
    # Containers may hide /proc/driver, but not the device nodes.
    devices = (name for name in names("/dev") if name[:6] == "nvidia" and name[6:].isdigit())
    return len(names("/proc/driver/nvidia/gpus") or list(devices))


def _amd_gpus() -> int:
    nodes = "/sys/class/kfd/kfd/topology/nodes"
    ids = [contents("%s/%s/gpu_id" % (nodes, name)).strip() for name in names(nodes)]
    return sum(each not in (b"", b"0") for each in ids)


class Utilization:
    """Utilization of each GPU, from NVML (nvml.h), which is loaded only on nodes with NVIDIA GPUs."""

    def __init__(self) -> None:
        self._nvml: Any = None
        if _nvidia_gpus():
            import ctypes

            try:
                self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
            except OSError:
                return
            if self._nvml.nvmlInit_v2() != 0:
                self._nvml = None

    def use(self, device: str) -> tuple[int | None, int | None]:
        """Return the utilization of a GPU in percent, and its memory use in bytes; None if unknown.

        `device` is as returned by `device_of`. The percentage is the share of the last second during which a
        kernel was running.
        """
        if self._nvml is None or not device:
            return None, None
        import ctypes

        handle, rates, memory = ctypes.c_void_p(), (ctypes.c_uint * 2)(), (ctypes.c_ulonglong * 3)()
        if device.isdecimal():
            failed = self._nvml.nvmlDeviceGetHandleByIndex_v2(int(device), ctypes.byref(handle))
        else:
            failed = self._nvml.nvmlDeviceGetHandleByUUID(os.fsencode(device), ctypes.byref(handle))
        if failed:
            return None, None
        busy = self._nvml.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(rates)) == 0
        sized = self._nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0
        return int(rates[0]) if busy else None, int(memory[2]) if sized else None  # total, free, used


def device_of(local_rank: int, visible: str | None) -> str:
    """Return the number or UUID of the GPU that LOCAL_RANK selects; "" if CUDA_VISIBLE_DEVICES hides it."""
    if visible is None:
        return str(local_rank)
    named = [device.strip() for device in visible.split(",")][: local_rank + 1]
    return named[-1] if len(named) > local_rank and "-1" not in named else ""  # -1 ends the list
