"""The host's work in a step: `plot_scheduler.py --record control`. First the schedulers alone, then
the whole engine around a model that returns the same logits immediately. Alone:

python -m workshop.plot_scheduler_control --profile      where the time goes, 1,024 running
python -m workshop.plot_scheduler_control --host         the whole host step, its parts
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import random
import statistics
import time
from collections.abc import Callable

from caching_fcfs_scheduler import CachingFCFSScheduler
from common.engine import LLMEngine
from common.engine_config import SHIPPED_CHECKPOINT, EngineConfig
from common.requests.gc_utils import freeze_gc_heap
from common.requests.tokenizer import load_tokenizer
from prefill_first_scheduler import PrefillFirstScheduler
from request import Request, SamplingParams
from scheduler import Scheduler, make_kv_memory
from scheduler_interface import SchedulerInterface, StepOutput
from workshop.measure.bench.stub_model import VOCAB_SIZE, stub_model

NUM_RUNNING = (16, 64, 256, 1024, 4096)
NUM_WAITING = (0, 1000, 100_000)
NUM_RUNNING_HOST = (256, 1024, 4096)
HOST_PARTS = ("schedule", "prepare", "sample", "update", "outputs", "whole")
MAX_TOKENS = 400


def _limits(num_running: int) -> dict:
    return {
        "max_num_seqs": num_running,
        "max_num_batched_tokens": max(8192, 40 * num_running),
        "kv_memory": make_kv_memory(40 * num_running + 1000),
    }


KINDS: dict[str, Callable[[int], SchedulerInterface]] = {
    "two phases": lambda n: Scheduler(**_limits(n)),
    "prefill first": lambda n: PrefillFirstScheduler(**_limits(n)),
    "chapter 1": lambda n: CachingFCFSScheduler(**_limits(n)),  # over the same memory
}


def fill(scheduler: SchedulerInterface, num_running: int, num_waiting: int) -> None:
    """Fill with requests whose prompts are computed, at different positions in their blocks."""
    rng = random.Random(0)

    def add(name: str, length: int) -> None:
        prompt = [rng.randrange(50_000) for _ in range(length)]
        scheduler.add_request(Request.from_tokens(name, prompt, MAX_TOKENS))

    for i in range(num_running):
        add(f"running {i}", rng.randint(17, 32))
    while scheduler.get_request_counts() != (num_running, 0):
        step(scheduler)
    for i in range(num_waiting):
        add(f"waiting {i}", 4)
    step(scheduler)


def step(scheduler: SchedulerInterface) -> float:
    """Return the seconds of one decode step's decisions."""
    start = time.perf_counter()
    output = scheduler.schedule()
    elapsed = time.perf_counter() - start
    sampled = StepOutput({request_id: [7] for request_id in output.num_scheduled_tokens})
    start = time.perf_counter()
    scheduler.update_from_output(output, sampled)
    return elapsed + time.perf_counter() - start


# -- the whole host step


def make_engine(num_running: int) -> LLMEngine:
    """Build the engine with all requests decoding, at different positions in their blocks."""
    limits = EngineConfig(
        device="cpu",
        max_num_seqs=num_running,
        max_num_batched_tokens=max(8192, 40 * num_running),
        num_blocks=32 * num_running,
    )
    engine = LLMEngine(
        limits,
        loaded=stub_model(max(NUM_RUNNING_HOST)),
        tokenizer=load_tokenizer(SHIPPED_CHECKPOINT),
    )
    rng = random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    for i in range(num_running):
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(17, 32))]
        engine.add_request(f"running {i}", prompt, params)
        if i % 128 == 127:
            engine.step()
    for _ in range(2):
        engine.step()
    return engine


def host_step(engine: LLMEngine) -> dict[str, float]:
    """Return milliseconds of each part of one decode step. `outputs` is the engine's work around
    the loop of chapter 1; `whole` is all but the model's forward."""
    start = time.perf_counter()
    engine.step()
    total = (time.perf_counter() - start) * 1e3
    record = engine.recorder.record()
    parts = {part: getattr(record, f"{part}_ms") for part in ("schedule", "prepare", "sample")}
    parts["update"] = record.update_ms
    whole = total - record.forward_ms
    return parts | {"outputs": whole - sum(parts.values()), "whole": whole}


def measure_host(*, tiny: bool) -> dict[str, dict[str, list[float]]]:
    """Return `{number running: {part: microseconds of each step}}`. The sizes take turns. Python's
    collector is set as in a server, else it runs in every step that makes 700 objects."""
    freeze_gc_heap()
    num_rounds, num_steps = (1, 3) if tiny else (5, 32)
    sizes = NUM_RUNNING_HOST[: 1 if tiny else None]
    engines = {str(size): make_engine(size) for size in sizes}
    found = {size: {part: [] for part in HOST_PARTS} for size in engines}
    for _ in range(num_rounds):
        for size, engine in engines.items():
            for _ in range(num_steps):
                for part, ms in host_step(engine).items():
                    found[size][part].append(round(ms * 1e3, 1))
    return found


def measure_control(*, tiny: bool) -> dict:
    """Return microseconds of each step. The kinds take turns, several steps each."""
    num_rounds, num_steps = (1, 3) if tiny else (5, 32)
    running_us: dict[str, dict[str, list[float]]] = {kind: {} for kind in KINDS}
    for num_running in NUM_RUNNING[: 2 if tiny else None]:
        made = {kind: make(num_running) for kind, make in KINDS.items()}
        for scheduler in made.values():
            fill(scheduler, num_running, 0)
        for _ in range(num_rounds):
            for kind, scheduler in made.items():
                times = running_us[kind].setdefault(str(num_running), [])
                times += [round(step(scheduler) * 1e6, 1) for _ in range(num_steps)]
    waiting_us: dict[str, dict[str, list[float]]] = {}
    for policy in ("fcfs", "priority"):
        for num_waiting in NUM_WAITING[: 2 if tiny else None]:
            scheduler = Scheduler(policy=policy, **_limits(256))
            fill(scheduler, 256, num_waiting)
            times = [round(step(scheduler) * 1e6, 1) for _ in range(num_rounds * num_steps)]
            waiting_us.setdefault(policy, {})[str(num_waiting)] = times
    return {
        "config": {"clock": "time.perf_counter", "num_steps": num_rounds * num_steps},
        "running_us": running_us,
        "waiting_us": waiting_us,
        "host_us": measure_host(tiny=tiny),
    }


def profile() -> None:
    scheduler = KINDS["two phases"](1024)
    fill(scheduler, 1024, 0)
    with cProfile.Profile() as profiler:
        for _ in range(200):
            step(scheduler)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--host", action="store_true")
    arguments = parser.parse_args()
    if arguments.profile:
        profile()
    if arguments.host:
        for size, parts in measure_host(tiny=False).items():
            shown = (f"{part} {statistics.median(us) / 1e3:.2f}" for part, us in parts.items())
            print(f"{size} running, median ms:", *shown)
