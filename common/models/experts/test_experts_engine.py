"""An engine over a model with experts, in the ways that the equivalence matrix has not: its runs
are in float64, where nothing is packed and graphs have no grouped product."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.features.adapters.adapter_slots import AdapterSlots
from common.models.loader import load_model
from common.tests.adapter_cases import OF_ATTENTION, edited, save_adapter
from common.tests.engine_oracle import checked_engine, greedy_params, num_replays
from common.tests.model_cases import EXPERTS, save_case
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


def test_adapter_weights_for_experts_are_refused_by_name(path, tmp_path):
    slots = AdapterSlots(load_model(path, torch.float64).model, 1, 8)
    attention_only = save_adapter(path, tmp_path / "own", **OF_ATTENTION["everything"])
    slots.begin(attention_only).take()
    name = "base_model.model.model.layers.0.mlp.experts.0.gate_proj.lora_{}.weight"
    inner, hidden = EXPERTS["moe_intermediate_size"], 32

    def add(weights: dict) -> None:
        weights[name.format("A")] = torch.zeros(8, hidden)
        weights[name.format("B")] = torch.zeros(inner, 8)

    with pytest.raises(ValueError, match=r"does not name: .*experts\.0\.gate_proj"):
        slots.begin(edited(attention_only, tmp_path / "more", tensors=add)).digest()
