"""What the process and the devices hold, read without asking a device to do anything."""

from __future__ import annotations

import os
import resource
import sys
from typing import Final

import torch

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_STATM: Final = "/proc/self/statm"
_STATM_BYTES: Final = 256
_PEAK_UNIT: Final = 1 if sys.platform == "darwin" else 1024


def read_memory() -> dict[str, float]:
    """Return resident and peak memory of the process, and allocated and reserved peaks of each GPU in use."""
    numbers = {"memory.process": _read_resident(), "memory.process_peak": _read_peak()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for device in range(torch.cuda.device_count()):
            numbers[f"memory.device{device}_peak"] = float(torch.cuda.max_memory_allocated(device))
            numbers[f"memory.device{device}_reserved"] = float(torch.cuda.memory_reserved(device))
    return numbers


def _read_resident() -> float:
    try:
        file = os.open(_STATM, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return float(os.read(file, _STATM_BYTES).split()[1]) * _PAGE_BYTES
        finally:
            os.close(file)
    except (OSError, IndexError, ValueError):
        return _read_peak()


def _read_peak() -> float:
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _PEAK_UNIT)
