"""A recorded run with any number of requests and steps, for tests of the page: a real engine whose
model returns a token immediately."""

from __future__ import annotations

import random
from pathlib import Path

from common.engine import LLMEngine
from common.engine_config import EngineConfig
from request import SamplingParams
from workshop.measure.bench.stub_model import VOCAB_SIZE, stub_model

NUM_SLOTS, LONGEST = 24, 160


def make_big_run(path: Path, num_requests: int, num_steps: int, seed: int) -> None:
    """Write to `path` a run of at least `num_steps` steps. Prompts come in chunks, and
    blocks are published and evicted."""
    rng = random.Random(seed)
    config = EngineConfig(
        device="cpu",
        max_num_seqs=NUM_SLOTS,
        max_num_batched_tokens=256,
        block_size=16,
        num_blocks=700,
        overlap_scheduling=False,
        events=path,
    )
    engine = LLMEngine(config, loaded=stub_model(NUM_SLOTS))
    mean = NUM_SLOTS * num_steps // num_requests  # output tokens, if every slot is always used
    step = num_arrived = 0
    while step < num_steps or engine.has_unfinished_requests():
        due = 1 + step * num_requests // max(1, num_steps * 2 // 3)
        is_idle = not engine.has_unfinished_requests()
        while num_arrived < min(due, num_requests) or is_idle:
            name = f"r{rng.randrange(num_arrived) if num_arrived >= num_requests else num_arrived}"
            prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(20, LONGEST))]
            max_tokens = rng.randint(mean // 2, mean * 3 // 2)
            params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
            engine.add_request(name, prompt, params)
            num_arrived, is_idle = num_arrived + 1, False
        engine.step()
        step += 1
    engine.close()
