"""C++ code that the engine runs on a CPU, compiled on first use.

`decode_attention.cpp`, a model's products and the operations between them (`compiled_linear.cpp`
and `compiled_regions.cpp` in `common`) are compiled for this processor, and for the shapes of a
model where that is faster. That takes a second or two. The library is kept in
`~/.cache/vllm-from-scratch` (`XDG_CACHE_HOME` is honoured), under a name that identifies the
source, the compiler, the processor and the constants, so the next start takes milliseconds.

A C interface, called by `ctypes`, needs neither PyTorch's headers nor Python's. A call checks
nothing, whereas a function made by `torch.compile` first checks whether it fits its arguments.

See 02_paged_kv/beyond/README.md"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch

logger = logging.getLogger(__name__)
T = TypeVar("T")

COMPILERS = "g++", "clang++"
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-shared", "-fPIC", "-fopenmp", "-Wno-psabi"),
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"),
)
SCALARS = {
    torch.float64: "double",
    torch.float32: "float",
    torch.bfloat16: "bfloat16",
    torch.float16: "_Float16",
}


def load_library(source: Path, constants: Mapping[str, object]) -> ctypes.CDLL:
    """Compile `source` to machine code. Raises `RuntimeError` without a C++ compiler, or if that
    fails, and `OSError` if the library cannot be kept."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise RuntimeError(f"cannot compile: no C++ compiler ({' or '.join(COMPILERS)}) was found")
    overrides = [f"-D{name}={value}" for name, value in constants.items()]
    command = [compiler, *FLAGS, f"-I{Path(__file__).parent}", *overrides]
    headers = [source, *sorted(Path(__file__).parent.glob("*.h"))]
    texts = [path.read_text(encoding="utf-8") for path in headers]
    version = Path(compiler).stat().st_mtime_ns
    key = hashlib.sha256(repr((command, version, processor(), texts)).encode()).hexdigest()
    library = cache_folder() / f"{source.stem}-{key[:32]}.so"
    if not library.exists():
        _compile(command, source, library)
    return ctypes.CDLL(str(library))


def try_to_compile(make: Callable[[], T], otherwise: str) -> T | None:
    """Return the result of `make`, which compiles; None, with a warning, if nothing can be
    compiled."""
    try:
        return make()
    except (OSError, RuntimeError) as error:
        logger.warning("%s: %s", otherwise, error)
        return None


def _compile(command: list[str], source: Path, library: Path) -> None:
    """Compile the whole library or nothing, because another process may need the same one now."""
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder, library.name)
        whole = [*command, "-o", str(made), str(source)]
        done = subprocess.run(whole, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{command[0]} failed: {done.stderr}")
        made.replace(library)


def cache_folder() -> Path:
    """The folder for libraries. Other users must not be able to
    write there, because its content is executed. Raises `OSError` if this user cannot."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home, "vllm-from-scratch")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


@cache
def processor() -> str:
    """Everything that `-march=native` depends on: different machines can share a home."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():  # not Linux, and the home is of one machine
        return ""
    lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    kinds = ("flags", "model name", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(kinds)}))
