"""The operators written in C++: built once a machine and torch version, kept in the cache folder.

Nothing depends on them: without a compiler the same is computed by torch, more slowly.
"""

from __future__ import annotations

import hashlib
import logging
import platform
import shutil
import subprocess
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths, library_paths

from herder.data.cache import build_once, cache_folder
from herder.errors import ResourceError
from herder.model.kernels import SOURCES, Kernels

_log = logging.getLogger(__name__)
_COMPILERS = ("g++", "clang++", "c++")
_VECTORS = {
    "AVX512": ("-DCPU_CAPABILITY=AVX512", "-DCPU_CAPABILITY_AVX512"),
    "AVX2": ("-DCPU_CAPABILITY=AVX2", "-DCPU_CAPABILITY_AVX2"),
}.get(torch.backends.cpu.get_cpu_capability(), ())
"""Which of torch's vector types to take."""
_OPTIONS = ("-std=c++20", "-O3", "-march=native", *_VECTORS, "-fopenmp", "-shared", "-fPIC")


def load_kernels() -> None:
    """Build what is not built yet, which takes about 40 s, and use it in every Linear."""
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        _log.warning("no C++ compiler on the PATH: decoding on this CPU is slower than it could be")
        return
    folder = cache_folder() / "kernels" / f"kernels-{_identity(compiler)}"
    if not folder.exists():
        _log.warning("building kernels for this CPU, once: about 40 s")
    try:
        build_once(folder, lambda fresh: _build(compiler, fresh))
        Kernels.load(folder / "kernels.so")
    except (ResourceError, OSError) as error:
        _log.warning("kernels for this CPU are not used, torch's are: %s", error)


def _identity(compiler: str) -> str:
    """Changes with all that a built library depends on: source, torch, processor, compiler."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = [line for line in cpuinfo.read_text().splitlines() if line.startswith("flags")][:1]
    sources = (source.read_text() for source in SOURCES)
    parts = (*sources, torch.__version__, platform.machine(), *flags, compiler, *_OPTIONS)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _build(compiler: str, folder: Path) -> None:
    places = [f"-I{path}" for path in include_paths()] + [f"-L{path}" for path in library_paths()]
    libraries = ["-ltorch_cpu", "-lc10"]
    output = folder / "kernels.so"
    command = [compiler, *_OPTIONS, *places, *map(str, SOURCES), "-o", str(output), *libraries]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ResourceError(f"{compiler} could not build the kernels: {done.stderr[-500:]}")
