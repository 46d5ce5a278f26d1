"""An engine over a model with experts, in the ways that the equivalence matrix has not: its runs
are in float64, where nothing is packed and graphs have no grouped product."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.models.loader import load_model
from common.tests.engine_oracle import checked_engine, greedy_params, num_replays
from common.tests.model_cases import save_case
from request import SamplingParams

PROMPTS = [[(7 * i + 3 * j) % 89 for j in range(n)] for i, n in enumerate((1, 5, 17, 30))]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_case("qwen3-moe", tmp_path_factory.mktemp("experts"))


def tokens(path: Path, dtype: torch.dtype, **config) -> tuple[list[list[int]], int]:
    config = {"num_blocks": 40, "max_model_len": 48, "max_num_seqs": 4, **config}
    engine = checked_engine(load_model(path, dtype), **config)
    outputs = engine.generate_batch(PROMPTS, greedy_params(8))
    return [o.outputs[0].token_ids for o in outputs.values()], num_replays(engine)


def test_graphs_with_the_grouped_product_and_packed_matrices_give_the_same_tokens(path):
    """In float32, whose product is one operation that takes the segments' ends as a tensor."""
    expected, _ = tokens(path, torch.float64)
    found, replays = tokens(path, torch.float32, emulate_graphs=True, compile=False)
    assert replays > 0 and found == expected
    assert tokens(path, torch.float32, compile=False)[0] == expected


def test_batch_invariance_holds_to_the_last_bit(path):
    engine = checked_engine(load_model(path, torch.float32), num_blocks=40, batch_invariant=True)
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=8, logprobs=2, ignore_eos=True)

    def seen(prompts: list[list[int]]) -> list[list]:
        outputs = engine.generate_batch(prompts, params).values()
        return [[(e.token_id, e.logprob, e.top) for e in o.outputs[0].logprobs] for o in outputs]

    together = seen(PROMPTS)
    assert together == [seen([prompt])[0] for prompt in PROMPTS]
