"""Small scripted workloads: the arrivals of requests, and an engine that serves and records them.

    script = Script((Visit("a", 0, "def f(x):", 8), ...), {"num_blocks": 20, ...})
    perform(script, "run.jsonl", load_cast())

The model is the shipped checkpoint, the text is real, and every token is the likeliest one. The
model computes in float64, where rounding in another batch or on another machine does not change a
token. So two films of one script differ only in their times."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from concurrent import futures
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from base_scheduler import BaseScheduler, SchedulerPlugin
from common.engine import LLMEngine
from common.engine_config import SHIPPED_ADAPTER, SHIPPED_CHECKPOINT, EngineConfig
from common.models.loader import LoadedModel, load_model, read_checkpoint
from common.requests.tokenizer import Tokenizer, load_tokenizer
from grammar_queue import GrammarsCompiled
from grammars import Grammar
from request import Request, RequestStatus, SamplingParams

MAX_STEPS = 500


@dataclass(frozen=True, slots=True)
class Visit:
    """A request that arrives before step `step` is planned."""

    name: str
    step: int
    prompt: str
    max_tokens: int
    stop: tuple[str, ...] = ()
    adapter: str | None = None
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class Script:
    """`visits` in order of arrival, and the engine's settings. `is_static`: a batch starts when no
    request runs, with the arrived requests that fit in `max_num_seqs`, and no request joins until
    the last one has finished. `adapters` are the shipped one with a given strength, by name. A
    grammar counts as compiled `compile_steps` steps after its arrival, regardless of the clock.
    With a `window`, every second layer of the model sees only that many tokens."""

    visits: tuple[Visit, ...]
    config: Mapping[str, Any] = field(default_factory=dict)
    is_static: bool = False
    adapters: Mapping[str, float] = field(default_factory=dict)
    compile_steps: int = 0
    window: int | None = None

    def but(self, **changes: Any) -> Script:
        """Return the same visits with other settings."""
        return replace(self, config={**self.config, **changes})


@dataclass(frozen=True, slots=True)
class Cast:
    """The model and other parts that every film uses, loaded once."""

    loaded: LoadedModel
    tokenizer: Tokenizer

    def model_for(self, script: Script) -> LoadedModel:
        return self.loaded if script.window is None else load_windowed(script.window)


def load_cast() -> Cast:
    """Load the shipped checkpoint."""
    loaded = load_model(SHIPPED_CHECKPOINT, torch.float64, torch.device("cpu"))
    return Cast(loaded, load_tokenizer(SHIPPED_CHECKPOINT))


@cache
def load_windowed(window: int) -> LoadedModel:
    checkpoint = read_checkpoint(SHIPPED_CHECKPOINT)
    windows = (None, window) * (checkpoint.config.num_hidden_layers // 2)
    config = replace(checkpoint.config, layer_windows=windows)
    return load_model(replace(checkpoint, config=config), torch.float64, torch.device("cpu"))


def perform(script: Script, path: str | Path, cast: Cast | None = None) -> dict[str, str]:
    """Serve a script, and write its events to `path`. Returns the answers by request. Raises
    `ValueError` or `FileNotFoundError` if no file can be written at `path`."""
    cast = cast or load_cast()
    config = EngineConfig(**script.config, device="cpu", dtype="float64")
    engine = LLMEngine(config, loaded=cast.model_for(script), tokenizer=cast.tokenizer)
    for name, strength in script.adapters.items():
        with tempfile.TemporaryDirectory() as folder:
            engine.load_adapter(name, _weakened(Path(folder), strength))
    scheduler = engine.scheduler
    assert isinstance(scheduler, BaseScheduler)
    if script.is_static:  # not an engine setting: chapter 1 replaces static batches
        scheduler.set_plugins([StaticBatches(), *scheduler.plugins])
    if script.compile_steps:
        late = CompiledLate(script.compile_steps)
        scheduler.set_plugins([late, *scheduler.plugins])
    engine.watch(path)
    to_come, answers = list(script.visits), dict[str, str]()
    for step in range(MAX_STEPS):
        while to_come and to_come[0].step <= step:
            _let_in(engine, to_come.pop(0))
        if engine.has_unfinished_requests():
            answers |= {o.request_id: o.outputs[0].text for o in engine.step() if o.finished}
        elif not to_come:
            engine.close()
            return answers
    raise RuntimeError(f"the script has not ended after {MAX_STEPS} steps")


class StaticBatches(SchedulerPlugin):
    """A scheduling rule: no request joins running ones."""

    is_open = True  # a batch is being put together

    def attach(self, scheduler: BaseScheduler) -> None:
        self._running = scheduler.running

    def begin_step(self) -> None:
        self.is_open = not self._running

    def can_start(self, request: Request) -> bool:
        return self.is_open


class CompiledLate(SchedulerPlugin):
    """Marks a grammar as compiled `num_steps` steps after a request with it was first checked."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps, self._step = num_steps, 0
        self._due: dict[str, int] = {}

    def attach(self, scheduler: BaseScheduler) -> None:
        self._scheduler = scheduler

    def begin_step(self) -> None:
        self._step += 1
        for plugin in self._scheduler.plugins:
            if isinstance(plugin, GrammarsCompiled):
                futures.wait(plugin._jobs.values())
        for request in self._scheduler.requests.values():
            if request.status is RequestStatus.WAITING_FOR_GRAMMAR:
                self.can_start(request)

    def can_start(self, request: Request) -> bool:
        if (source := request.features.get("grammar")) is None:
            return True
        due = self._due.setdefault(source, self._step + self._num_steps)
        early, ready = RequestStatus.WAITING_FOR_GRAMMAR, RequestStatus.WAITING
        request.status = early if self._step < due else ready
        return request.status is ready


def _weakened(folder: Path, strength: float) -> Path:
    """Write the shipped adapter with another scale."""
    shutil.copytree(SHIPPED_ADAPTER, folder, dirs_exist_ok=True)
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["lora_alpha"] *= strength
    path.write_text(json.dumps(config), encoding="utf-8")
    return folder


def _let_in(engine: LLMEngine, visit: Visit) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=visit.max_tokens, stop=visit.stop, grammar=visit.grammar
    )
    engine.add_request(visit.name, visit.prompt, params, adapter=visit.adapter)


# -- the run that is shown if no run is given

_STACK = """class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()

"""
_IMPORTS = "import os\nimport sys\nimport re\n"

# Eight requests, and a little of everything: a shared prefix, a prompt in chunks, a queue, a
# preemption, evictions, draft tokens, a stop string.
DEFAULT = Script(
    (
        Visit("a", 0, "def is_prime(n):\n    for", 40),
        Visit("b", 1, _IMPORTS + "import", 24),
        Visit("c", 3, _STACK + "    def peek(self):\n        return", 12),
        Visit("d", 4, "def mean(values):\n    return", 36),
        Visit("e", 10, _STACK + "    def size(self):\n        return", 16, stop=("\n\n",)),
        Visit("f", 12, _STACK + "    def clear(self):", 12),
        Visit("g", 14, "def read_lines(path):\n    with open(path) as", 24),
        Visit("h", 15, _IMPORTS + "\n\ndef main():", 24),
    ),
    {
        "block_size": 4,
        "num_blocks": 31,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 20,
        "chunked_prefill": 16,
        "watermark": 0.0,
        "speculative": {"method": "ngram", "num_spec_tokens": 2, "adaptive": False},
    },
)
