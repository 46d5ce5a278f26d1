"""Features of one engine: batches with them and without. `features.py` runs these workloads.

`device`   a simulated device: the result of a step can be read a given number of milliseconds after
           the end of the step before, as if kernels were queued. The host's work is the real one.
           The possible gain shows: a step takes the longer of the two instead of their sum
`cpu`      the shipped model on this processor, whose cores host and device share
`stops`    the same, with answers that end at a stop token: work begun after it is lost
`host`     a model that returns the same token immediately: milliseconds of host work a step
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from common.engine import EngineConfig, LLMEngine
from common.engine_config import SHIPPED_ADAPTER, SHIPPED_CHECKPOINT
from common.features.grammars import grammar_masks
from common.features.grammars.grammar_masks import GrammarMasks
from common.features.grammars.lark_text import compile_source
from common.features.grammars.vocabulary import Vocabulary, beginning_of, tokenizer_of
from common.models.loader import LoadedModel, load_model
from common.requests.tokenizer import Tokenizer, load_tokenizer
from grammars import Choice, Ebnf, Grammar, Json, Regex, source_of
from request import SamplingParams
from scheduler_interface import ModelRunner, RunnerInput, StepHandle, StepOutput
from workshop.measure.bench.bench_record import markdown_table
from workshop.measure.bench.bench_work import greedy
from workshop.measure.bench.stub_model import stub_model
from workshop.measure.rounds import Case, median_of, ratios

Config = dict[str, Any]
Clock = Callable[[], float]


def load_shipped(dtype: torch.dtype | str = "auto") -> LoadedModel:
    return load_model(SHIPPED_CHECKPOINT, dtype, torch.device("cpu"))


def make_engine(
    loaded: LoadedModel, num_seqs: int, tokenizer: Tokenizer | None = None, **options: Any
) -> LLMEngine:
    parts: dict[str, Any] = {"prefix_cache": None, "num_blocks": 8 * num_seqs + 20}
    config = EngineConfig(device="cpu", max_num_seqs=num_seqs, **parts | options)
    return LLMEngine(config, loaded=loaded, tokenizer=tokenizer)


def prompt(i: int, length: int, vocab_size: int = 4010) -> list[int]:
    return [5 + (31 * i + 7 * j) % (vocab_size - 10) for j in range(length)]


def short_prompts(num_requests: int, loaded: LoadedModel) -> list[list[int]]:
    return [prompt(i, 12 + i % 8, loaded.config.vocab_size) for i in range(num_requests)]


def run_batch(
    engine: LLMEngine,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    *,
    adapters: Sequence[str | None] | None = None,
    clock: Clock = time.perf_counter,
    on_decode: Callable[[], object] = lambda: None,
) -> tuple[dict[str, float], dict[str, float]]:
    """Serve requests that arrive at the same time. Returns seconds, steps and output tokens, of the
    whole, and of the steps after all prompts, before which `on_decode` is called."""
    engine.reset_prefix_cache()
    engine.reset_stats()
    start = clock()
    engine.add_requests([(str(i), p, params) for i, p in enumerate(prompts)], adapters)
    while engine.stats().num_waiting:
        engine.step()
    on_decode()
    middle, before = clock(), engine.stats()
    while engine.has_unfinished_requests():
        engine.step()
    end, after = clock(), engine.stats()
    engine.step()  # discards the step that is still in flight
    whole = {"seconds": end - start, "num_steps": after.num_steps}
    decode = {"seconds": end - middle, "num_steps": after.num_steps - before.num_steps}
    for found, num_before in ((whole, 0), (decode, before.output_tokens)):
        found["seconds"] = round(found["seconds"], 6)
        found["output_tokens"] = after.output_tokens - num_before
    return whole, decode


def step_ms(run: dict[str, float]) -> float:
    return 1e3 * run["seconds"] / run["num_steps"]


def median_step_ms(runs: Sequence[dict[str, float]]) -> float:
    return statistics.median(map(step_ms, runs))


# -- adapters


def copy_adapter(path: Path, **changes: Any) -> Path:
    """Copy the shipped adapter, with other fields in its `adapter_config.json`."""
    shutil.copytree(SHIPPED_ADAPTER, path)
    file = path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return path


def adapter_batches(config: Config) -> dict[str, list[str | None]]:
    """Return the adapter of each request, by setting."""
    indices = range(config["num_requests"])
    batches: dict[str, list[str | None]] = {"none": [None for _ in indices]}
    for share, every in (("half", 2), ("all", 1)):
        for number in config["numbers"]:
            batches[f"{share}, {number} different"] = [
                None if i % every else str(i // every % number) for i in indices
            ]
    return batches


def run_by_peft(model: Any, config: Config) -> dict[str, float]:
    seconds = {"prompts": 0.0, "answers": 0.0}
    for i in range(config["num_by_peft"]):
        ids = torch.tensor([prompt(i, config["num_prompt"])])
        for name, length in (("prompts", 1), ("answers", config["num_answer"])):
            start = time.process_time()
            model.generate(ids, max_new_tokens=length, min_new_tokens=length, do_sample=False)
            seconds[name] += time.process_time() - start
    return {"prompts": seconds["prompts"], "answers": seconds["answers"] - seconds["prompts"]}


def adapter_cases(config: Config) -> Iterator[Case]:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    num_requests, num_prompt = config["num_requests"], config["num_prompt"]
    prompts = [prompt(i, num_prompt) for i in range(num_requests)]
    params = greedy(config["num_answer"])
    base = AutoModelForCausalLM.from_pretrained(SHIPPED_CHECKPOINT, dtype=torch.float32)
    peft = PeftModel.from_pretrained(base, SHIPPED_ADAPTER).float().eval()
    with TemporaryDirectory() as folder:
        number = max(config["numbers"])
        engine = make_engine(
            load_shipped(torch.float32),
            num_requests,
            max_num_batched_tokens=num_requests * num_prompt,
            overlap_scheduling=False,
            max_loras=number,
            adapters={  # different scales, so different content
                f"{i}": copy_adapter(Path(folder, f"{i}"), lora_alpha=16 - i) for i in range(number)
            },
        )

        def run(adapters: list[str | None]) -> dict[str, float]:
            clock = time.process_time
            whole, decode = run_batch(engine, prompts, params, adapters=adapters, clock=clock)
            prompts_s = round(whole["seconds"] - decode["seconds"], 6)
            return {"prompts": prompts_s, "answers": decode["seconds"]}

        settings: dict[str, Callable[[], Any]] = {
            name: partial(run, adapters) for name, adapters in adapter_batches(config).items()
        }
        settings["`peft`, one request at a time"] = partial(run_by_peft, peft, config)
        yield Case("batches", f"{num_requests} requests", settings)
        engine.close()


def adapter_tables(record: Config) -> list[str]:
    """Return the speed of each batch, and its share of the round's speed without adapters."""
    config, (found,) = record["config"], record["runs"]["batches"].values()
    rows = []
    for name, runs in found.items():
        cells = [name]
        number = config["num_by_peft" if "peft" in name else "num_requests"]
        for kind, num_tokens in (
            ("answers", config["num_answer"] - 1),
            ("prompts", config["num_prompt"]),
        ):
            speed = [number * num_tokens / run[kind] for run in runs]
            base = [config["num_requests"] * num_tokens / run[kind] for run in found["none"]]
            share = "1" if name == "none" else ratios(speed, base)
            cells += [f"{statistics.median(speed):,.0f}", share]
        rows.append(cells)
    head = ["with an adapter", "answers, tok/s", "of none's", "prompts, tok/s", "of none's"]
    return [markdown_table(head, rows)]


# -- events


def event_cases(config: Config) -> Iterator[Case]:
    tokenizer = load_tokenizer(SHIPPED_CHECKPOINT)
    for n in config["num_running"]:
        yield from watched_and_not("host", stub_model(n), None, n, config)
    for n in config["num_running"]:
        yield from watched_and_not("cpu", load_shipped(), tokenizer, n, config)


def watched_and_not(
    part: str, loaded: LoadedModel, tokenizer: Tokenizer | None, n: int, config: Config
) -> Iterator[Case]:
    with TemporaryDirectory() as folder:
        path, parts = Path(folder) / "run.jsonl", {"prefix_cache": "hash"}
        engines = {
            name: make_engine(loaded, n, tokenizer, **parts, overlap_scheduling=False, events=file)
            for name, file in (("off", None), ("on", path))
        }

        def run(name: str) -> dict[str, float]:
            num_before = path.stat().st_size
            params = greedy(config["max_tokens"])
            whole, _ = run_batch(engines[name], short_prompts(n, loaded), params)
            num_bytes = path.stat().st_size - num_before
            return whole | ({"file_bytes": num_bytes} if name == "on" else {})

        off, on = partial(run, "off"), partial(run, "on")
        yield Case(part, f"{n} running", {"off": off, "on": on, "off again": off})
        for engine in engines.values():
            engine.close()


def event_tables(record: Config) -> list[str]:
    def tokens_per_s(runs: list[dict[str, float]]) -> float:
        return statistics.median(run["output_tokens"] / run["seconds"] for run in runs)

    tables = []
    for part, title, unit, number, digits in (
        ("host", "host work alone", "ms a step", median_step_ms, 3),
        ("cpu", "shipped model", "tok/s", tokens_per_s, 0),
    ):
        rows = []
        for name, found in record["runs"][part].items():
            seconds = {kind: [run["seconds"] for run in runs] for kind, runs in found.items()}
            num_bytes, num_steps = (
                sum(run[field] for run in found["on"]) for field in ("file_bytes", "num_steps")
            )
            times = [ratios(seconds[kind], seconds["off"]) for kind in ("on", "off again")]
            shown = [f"{number(found[kind]):.{digits}f}" for kind in ("off", "on")]
            rows.append([name, *shown, *times, f"{num_bytes / num_steps:,.0f}"])
        head = [title, f"off, {unit}", f"on, {unit}", "on, times the time"]
        tables.append(markdown_table([*head, "off again, times the time", "bytes a step"], rows))
    return tables


# -- grammars


SCHEMA = {"type": "array", "minItems": 99, "items": {"enum": ["open", "closed", 7, None]}}
GRAMMARS: dict[str, Grammar] = {
    "JSON schema": Json(SCHEMA),
    "regular expression": Regex(r"[0-9]{4}-[0-9]{2}-[0-9]{2}( [a-z]+)*"),
    "choice of 100": Choice([f"label {i}" for i in range(100)]),
    "rules": Ebnf('root ::= sum\nsum ::= item ("+" item)*\nitem ::= [0-9]+ | "(" sum ")"'),
}


class Stopwatch:
    """Adds up the milliseconds of calls."""

    def __init__(self) -> None:
        self.ms = 0.0

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                self.ms += 1e3 * (time.perf_counter() - start)

        return timed


def run_with_masks(engine: LLMEngine, num_rows: int, params: SamplingParams) -> dict[str, float]:
    """Return milliseconds of a decode step, and of what it spends on bits and on logits."""
    fill, apply = Stopwatch(), Stopwatch()
    plain = GrammarMasks.before_sampling, grammar_masks.forbid

    def on_decode() -> None:
        GrammarMasks.before_sampling = fill.around(plain[0])
        grammar_masks.forbid = apply.around(plain[1])

    prompts = [prompt(i, 3) for i in range(num_rows)]
    try:
        _, decode = run_batch(engine, prompts, params, on_decode=on_decode)
    finally:
        GrammarMasks.before_sampling, grammar_masks.forbid = plain
    ms = {"step": 1e3 * decode["seconds"], "fill": fill.ms, "apply": apply.ms}
    return {name: round(value / decode["num_steps"], 4) for name, value in ms.items()}


def grammar_cases(config: Config) -> Iterator[Case]:
    loaded, tokenizer = load_shipped(), load_tokenizer(SHIPPED_CHECKPOINT)
    constrained = SamplingParams(
        temperature=0, max_tokens=config["max_tokens"], grammar=Json(config["schema"])
    )
    settings = {"without": greedy(config["max_tokens"]), "with": constrained}
    for n in config["num_rows"]:
        engine = make_engine(loaded, n, tokenizer)
        runs = {name: partial(run_with_masks, engine, n, p) for name, p in settings.items()}
        yield Case("steps", f"{n}", runs)
        engine.close()
    vocabulary = Vocabulary.of(tokenizer, tokenizer.vocab_size, loaded.generation_eos_token_ids)
    rng, letters = random.Random(0), b'abcdefghijklmnopqrstuvwxyz {}",:0123456789'
    new_ids = range(len(vocabulary.token_bytes), config["num_large"])
    random_tokens = [bytes(rng.choices(letters, k=rng.randint(2, 9))) for _ in new_ids]
    large = Vocabulary((*vocabulary.token_bytes, *random_tokens), vocabulary.eos_token_ids)
    for name, grammar in GRAMMARS.items():
        runs = {
            "compile_ms": partial(time_compiling, grammar, vocabulary),
            "fill_us": partial(time_masks, grammar, large, config["num_masks"]),
        }
        yield Case("masks", name, runs)


def time_compiling(grammar: Grammar, vocabulary: Vocabulary) -> float:
    """Return the milliseconds until a source is a matcher with its first mask."""
    beginning_of.cache_clear()
    start = time.perf_counter()
    compile_source(source_of(grammar), tokenizer_of(vocabulary))
    return round(1e3 * (time.perf_counter() - start), 4)


def time_masks(grammar: Grammar, vocabulary: Vocabulary, num_masks: int) -> list[float]:
    """Return the microseconds of each mask along a text that is drawn token by token."""
    matched = GrammarMasks(vocabulary).match(
        compile_source(source_of(grammar), tokenizer_of(vocabulary))
    )
    rng, times_us = random.Random(1), []
    bits = np.zeros((1, -(-len(vocabulary.token_bytes) // 32)), dtype=np.int32)
    while len(times_us) < num_masks:
        start = time.perf_counter()
        matched.fill(bits, 0, ())
        times_us.append(round(1e6 * (time.perf_counter() - start), 1))
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
        allowed = [t for t in allowed.tolist() if t not in vocabulary.eos_token_ids]
        if not allowed:
            break
        matched._accept(rng.choice(allowed))
    return times_us


def grammar_tables(record: Config) -> list[str]:
    rows = []
    for n, found in record["runs"]["steps"].items():
        without, steps = ([run["step"] for run in found[name]] for name in ("without", "with"))
        shown = [
            (found["without"], "step"),
            *((found["with"], k) for k in ("step", "fill", "apply")),
        ]
        rows.append([n, *(f"{median_of(*one):.2f}" for one in shown), ratios(steps, without)])
    head = ["rows with a grammar", "ms a step without", "with", "of it bits", "of it logits"]
    steps = markdown_table([*head, "times as long (lowest-highest)"], rows)
    rows = []
    for name, found in record["runs"]["masks"].items():
        times_us = [us for run in found["fill_us"] for us in run]
        median_us, compile_ms = map(statistics.median, (times_us, found["compile_ms"]))
        rows.append([name, f"{compile_ms:.1f}", f"{median_us:.0f}", f"{max(times_us):.0f}"])
    bits = f"us for a row of {record['config']['num_large']:,} bits"
    return [steps, markdown_table(["", "ms to compile", bits, "longest"], rows)]


# -- overlapped steps


@dataclass(frozen=True, slots=True)
class QueuedStep:
    handle: StepHandle
    ends_at: float  # seconds of `time.perf_counter()`

    def wait(self) -> StepOutput:
        time.sleep(max(0.0, self.ends_at - time.perf_counter()))
        return self.handle.wait()


class QueuedDevice:
    """A `ModelRunner` whose steps take `seconds` each, one after another, without a processor."""

    def __init__(self, runner: ModelRunner, seconds: float) -> None:
        self.runner, self.seconds, self._is_free_at = runner, seconds, 0.0

    def execute(self, plan: RunnerInput) -> QueuedStep:
        handle = self.runner.execute(plan)
        if not plan.is_empty:
            self._is_free_at = max(self._is_free_at, time.perf_counter()) + self.seconds
        return QueuedStep(handle, self._is_free_at)


def overlap_cases(config: Config) -> Iterator[Case]:
    params = greedy(config["max_tokens"])
    for ms in config["device_ms"]:
        for n in config["num_running_device"]:
            name = f"{ms:g} ms, {n} running"
            yield from overlapped_and_not("device", name, stub_model(n), n, params, ms / 1e3)
    shipped = load_shipped()
    # Drawn tokens end an answer at a third of the vocabulary: after three tokens, on average.
    stop_ids = list(range(0, shipped.config.vocab_size, 3))
    max_tokens = config["max_tokens"]
    stops = SamplingParams(seed=1, temperature=2.0, max_tokens=max_tokens, stop_token_ids=stop_ids)
    for threads in config["num_threads"]:
        torch.set_num_threads(threads)
        suffix = f"running, {threads} thread{'s' * (threads > 1)}"
        for n in config["num_running_cpu"]:
            yield from overlapped_and_not("cpu", f"{n} {suffix}", shipped, n, params)
        n = config["num_running_stops"]
        yield from overlapped_and_not("stops", f"{n} {suffix}", shipped, n, stops)


def overlapped_and_not(
    part: str,
    name: str,
    loaded: LoadedModel,
    n: int,
    params: SamplingParams,
    device_s: float | None = None,
) -> Iterator[Case]:
    kinds = {"plain": False, "overlapped": True}
    engines = {k: make_engine(loaded, n, overlap_scheduling=on) for k, on in kinds.items()}
    cores: list[Any] = [engine.core for engine in engines.values()]
    runners = [core.runner for core in cores]
    for core in cores:
        if device_s is not None:
            inner = getattr(core.runner, "runner", core.runner)  # without the thread
            core.runner = QueuedDevice(inner, device_s)

    def run(engine: LLMEngine) -> dict[str, float]:
        _, decode = run_batch(engine, short_prompts(n, loaded), params)
        return decode | {"discarded_tokens": engine.stats().discarded_tokens}

    settings = {kind: partial(run, engine) for kind, engine in engines.items()}
    yield Case(part, name, settings, round_factor=4 if part == "stops" else 1)
    for engine, core, runner in zip(engines.values(), cores, runners, strict=True):
        core.runner = runner
        engine.close()


def overlap_tables(record: Config) -> list[str]:
    def token_ms(run: dict[str, float]) -> float:
        return 1e3 * run["seconds"] / run["output_tokens"]

    tables = []
    for part, cases in record["runs"].items():
        number, unit, digits = (step_ms, "ms a step", 2)
        if part == "stops":
            number, unit, digits = (token_ms, "ms a token", 3)
        rows = []
        for name, found in cases.items():
            plain, overlapped = found["plain"], found["overlapped"]
            shown = [f"{statistics.median(map(number, r)):.{digits}f}" for r in (plain, overlapped)]
            if part == "stops":
                discarded, tokens = (
                    sum(run[field] for run in overlapped)
                    for field in ("discarded_tokens", "output_tokens")
                )
                shown.append(f"{discarded / tokens:.0%}")
            speedup = ratios(map(token_ms, plain), map(token_ms, overlapped))
            rows.append([f"{'device of ' * (part == 'device')}{name}", *shown, speedup])
        head = ["", f"plain, {unit}", f"overlapped, {unit}"]
        head += ["discarded tokens"] * (part == "stops")
        tables.append(markdown_table([*head, "times as fast (lowest-highest)"], rows))
    return tables


# -- token rules


RULES: dict[str, dict[str, Any]] = {
    "without": {},
    "logit_bias": {"logit_bias": {token: 1.0 for token in range(100, 120)}},
    "allowed_token_ids": {"allowed_token_ids": tuple(range(10, 3_000))},
    "bad_words": {"bad_words": [[token] for token in range(200, 220)]},
    "two words": {"bad_words": [[token, 300] for token in range(200, 220)]},
    "logprobs=5": {"logprobs": 5},
}
RULES["all"] = {name: value for rule in RULES.values() for name, value in rule.items()}
RULES["all"]["bad_words"] = [*RULES["bad_words"]["bad_words"], *RULES["two words"]["bad_words"]]


def token_rule_cases(config: Config) -> Iterator[Case]:
    loaded, tokenizer = load_shipped(), load_tokenizer(SHIPPED_CHECKPOINT)
    for n in config["num_rows"]:
        engine = make_engine(loaded, n, tokenizer)

        def run(rule: dict[str, Any], engine: LLMEngine = engine, n: int = n) -> float:
            params = replace(greedy(config["max_tokens"]), **rule)
            _, decode = run_batch(engine, [prompt(i, 3) for i in range(n)], params)
            return round(step_ms(decode), 4)

        yield Case("steps", f"{n}", {name: partial(run, rule) for name, rule in RULES.items()})
        engine.close()


def token_rule_tables(record: Config) -> list[str]:
    steps = record["runs"]["steps"]
    plain = [f"{statistics.median(found['without']):.2f} ms" for found in steps.values()]
    rows = [["nothing, ms a step", *plain]]
    for rule in list(RULES)[1:]:
        rows.append([rule, *(ratios(found[rule], found["without"]) for found in steps.values())])
    head = ["every row has", *(f"{n} rows, times the time without" for n in steps)]
    return [markdown_table(head, rows)]
