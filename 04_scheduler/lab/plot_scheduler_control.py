"""What a decision costs: `plot_scheduler.py --record control`. Alone:

python 04_scheduler/lab/plot_scheduler_control.py --profile      where the time goes, 256 running
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import random
import time
from collections.abc import Callable

from caching_fcfs_scheduler import CachingFCFSScheduler
from prefill_first_scheduler import PrefillFirstScheduler
from request import Request
from scheduler import Scheduler, make_kv_memory
from scheduler_interface import SchedulerInterface, StepOutput

NUM_RUNNING = (16, 64, 256, 1024, 4096)
NUM_WAITING = (0, 1000, 100_000)
MAX_TOKENS = 400
# Reference points of this project, measured on this kind of machine: schedule + update, a decode
# step, ms.
ELSEWHERE_MS = {"nano-vllm": {256: 0.125, 1024: 0.49}, "vLLM 0.32": {256: 2.6, 1024: 11.9}}


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
    """Everybody has computed its prompt, at different places in their blocks."""
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
    """Seconds of one decode step's decisions."""
    start = time.perf_counter()
    output = scheduler.schedule()
    elapsed = time.perf_counter() - start
    sampled = StepOutput({request_id: [7] for request_id in output.num_scheduled_tokens})
    start = time.perf_counter()
    scheduler.update_from_output(output, sampled)
    return elapsed + time.perf_counter() - start


def measure_control(*, tiny: bool) -> dict:
    """Microseconds of each step. The kinds take turns, a stretch of steps each."""
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
        "elsewhere_ms": ELSEWHERE_MS,
    }


def profile() -> None:
    scheduler = KINDS["two phases"](256)
    fill(scheduler, 256, 0)
    with cProfile.Profile() as profiler:
        for _ in range(200):
            step(scheduler)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--profile", action="store_true")
    if parser.parse_args().profile:
        profile()
