"""C++ that the engine computes with on a CPU, compiled when it is first wanted.

`decode_attention.cpp`, a model's products and what lies between them (`compiled_linear.cpp` and
`compiled_regions.cpp` in `common`) are compiled for this processor, and the shapes of a
model where that is faster. It takes a second or two. The library
is kept in `~/.cache/vllm-from-scratch` (`XDG_CACHE_HOME` is honoured), under a name that tells the
source, the compiler, the processor and the constants, so the next start takes milliseconds.

A C interface, called by `ctypes`, wants neither PyTorch's headers nor Python's; and a call checks
nothing, where one of what `torch.compile` makes first looks whether it fits its arguments."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch

logger = logging.getLogger(__name__)
T = TypeVar("T")

COMPILERS = "g++", "clang++"
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-shared", "-fPIC"),
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"),
    *("-Wno-unknown-pragmas", "-Wno-psabi"),
)
THREADS = ("-fopenmp",), ("-fopenmp-simd",)  # the second one where there is no OpenMP: one thread
SCALARS = {
    torch.float64: "double",
    torch.float32: "float",
    torch.bfloat16: "bfloat16",
    torch.float16: "_Float16",
}


def load_library(source: Path, constants: Mapping[str, object]) -> ctypes.CDLL:
    """`source` in machine code. Raises `RuntimeError` without a C++ compiler, or if that fails."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise RuntimeError(f"cannot compile: no C++ compiler ({' or '.join(COMPILERS)}) was found")
    defines = [f"-D{name}={value}" for name, value in constants.items()]
    command = [compiler, *FLAGS, f"-I{Path(__file__).parent}", *defines]
    headers = [source, *sorted(Path(__file__).parent.glob("*.h"))]
    texts = [path.read_text(encoding="utf-8") for path in headers]
    version = os.stat(os.path.realpath(compiler)).st_mtime_ns
    key = hashlib.sha256(repr((command, version, processor(), texts)).encode()).hexdigest()
    library = cache_folder() / f"{source.stem}-{key[:32]}.so"
    if not library.exists():
        _compile(command, source, library)
    return ctypes.CDLL(str(library))


def try_to_compile(make: Callable[[], T], what: str, otherwise: str) -> T | None:
    """What `make` makes of machine code; None, and a warning, where nothing can be compiled."""
    start = time.perf_counter()
    try:
        compiled = make()
    except (OSError, RuntimeError) as error:
        logger.warning("%s: %s", otherwise, error)
        return None
    logger.info("%s compiled in %.1f s", what, time.perf_counter() - start)
    return compiled


def _compile(command: list[str], source: Path, library: Path) -> None:
    """Complete or not at all: another process may want the same one now."""
    handle, made = tempfile.mkstemp(suffix=".so", dir=library.parent)
    os.close(handle)
    try:
        for threads in THREADS:
            whole = [*command, *threads, "-o", made, str(source)]
            done = subprocess.run(whole, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                os.replace(made, library)
                return
        says = next((line for line in done.stderr.splitlines() if "error" in line), "no reason")
        raise RuntimeError(f"{Path(command[0]).name} failed: {says}")
    finally:
        Path(made).unlink(missing_ok=True)


def cache_folder() -> Path:
    """Where what was found out about this processor is kept. Other users must not write there:
    what is in it is executed."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home, "vllm-from-scratch")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK | os.X_OK)
    except OSError:
        writable = False
    return folder if writable else _folder_of_this_process()


@cache
def _folder_of_this_process() -> Path:
    return Path(tempfile.mkdtemp(prefix="vllm-from-scratch-"))


@cache
def processor() -> str:
    """All that `-march=native` depends on: a home may be shared by machines of many kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(
        sorted(
            {
                line
                for line in lines
                if line.startswith(("flags", "model name", "Features", "CPU part"))
            }
        )
    )
