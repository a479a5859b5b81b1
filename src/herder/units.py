"""Bytes, FLOP, seconds, tokens and ranks as text. GB is 1e9 bytes, GiB is 2**30."""

from __future__ import annotations

from collections.abc import Sequence

GB = 10**9
GIB = 2**30
TFLOP = 10**12

_SI = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_COUNT = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))


def format_gb(num_bytes: float) -> str:
    """Bytes as GB (1e9), with as many digits as are meaningful."""
    gb = num_bytes / GB
    return f"{gb:,.1f} GB" if gb >= 10 else f"{gb:.2f} GB" if gb >= 0.1 else f"{gb * 1e3:.1f} MB"


def format_count(number: float) -> str:
    """A count of parameters or tokens: 6.74B, 134.5M."""
    for size, suffix in _COUNT:
        if number >= size:
            return f"{number / size:.2f}{suffix}"
    return f"{number:,.0f}"


def format_flops(flops: float) -> str:
    """FLOP, or FLOP a second: 1.20 TFLOP."""
    for size, prefix in _SI:
        if flops >= size:
            return f"{flops / size:.2f} {prefix}FLOP"
    return f"{flops:.0f} FLOP"


def format_seconds(seconds: float) -> str:
    """A duration as people say it: 850 ms, 12.3 s, 4 min 05 s, 3 h 20 min, 12.5 days."""
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    if seconds < 48 * 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"
    return f"{seconds / 86400:,.1f} days"


def format_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 0, 2-5` for ascending numbers."""
    runs = list[list[int]]()
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    spans = (str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(spans)}"
