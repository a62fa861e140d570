"""What this node has: its GPUs."""

import os


def gpu_count() -> int:
    """GPUs that a worker would see: CUDA_VISIBLE_DEVICES, else what the drivers list."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        named = [device.strip() for device in visible.split(",")]
        # As CUDA reads it: the list ends at the first invalid entry.
        return next((i for i, device in enumerate(named) if device in ("", "-1")), len(named))
    return _nvidia_gpus() or _amd_gpus()


def _nvidia_gpus() -> int:
    try:
        return len(os.listdir("/proc/driver/nvidia/gpus"))
    except OSError:
        # Containers may hide /proc/driver; the device nodes stay.
        return sum(name[:6] == "nvidia" and name[6:].isdigit() for name in os.listdir("/dev"))


def _amd_gpus() -> int:
    nodes = "/sys/class/kfd/kfd/topology/nodes"
    try:
        return sum(_reads_nonzero("%s/%s/gpu_id" % (nodes, name)) for name in os.listdir(nodes))
    except OSError:
        return 0


def _reads_nonzero(path: str) -> bool:
    try:
        with open(path) as file:
            return file.read().strip() not in ("", "0")
    except OSError:
        return False
