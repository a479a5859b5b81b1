"""Memory of this process as the system counts it: what tensors, kernels and buffers of gloo have
written to and not given back, whichever thread took or freed it."""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path

import torch

STATUS = Path("/proc/self/status")


def status_bytes(name: str) -> int:
    """VmRSS: resident now. VmHWM: the most since `forget_peak`. RssFile: of libraries."""
    words = STATUS.read_text().split()
    return int(words[words.index(f"{name}:") + 1]) * 1024


def forget_peak() -> None:
    """Let VmHWM begin anew at what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def return_what_is_freed() -> None:
    """Let glibc keep no block of over 64 KiB for later ones, so that what is resident is in use."""
    mmap_threshold = -3
    assert ctypes.CDLL(None).mallopt(mmap_threshold, 1 << 16) == 1, "not glibc"


def peak_bytes(device: str) -> int:
    """Allocated on a GPU, or the process' resident memory."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    if STATUS.exists():  # getrusage remembers what the process that started this one had
        return status_bytes("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
