"""Peak memory of this process and of a device, where the system tells it."""

from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


def reset_peak(device: torch.device) -> None:
    """Start to look for a peak: on Linux for CPUs, and on CUDA devices."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        _CLEAR.write_text(_RESET_PEAK)
    except OSError:
        return


def peak_bytes(device: torch.device) -> int | None:
    """Peak since :func:`reset_peak`; None where it cannot be read.

    Parameters
    ----------
    device
        For CUDA what torch has allocated on it; for a CPU what the process has in memory, all of
        its libraries and data among it.

    Returns
    -------
    Bytes.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _from_status("VmHWM")


def resident_bytes() -> int | None:
    """What the process has in memory now; None where it cannot be read."""
    return _from_status("VmRSS")


def _from_status(name: str) -> int | None:
    try:
        lines = _STATUS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None
