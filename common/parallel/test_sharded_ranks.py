"""Ranks in processes of their own, over Gloo: 4, in worlds of 2 to 4. They are started once, and
what they say and get is compared with one process, with `transformers` and with the formula."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from common.models.loader import load_model
from common.models.model_config import ModelConfig
from common.models.ranks import Ranks
from common.parallel.sharded_layers import rows_per_rank
from common.tests.adapter_cases import KINDS, save_adapter, with_peft
from common.tests.forked import Forked
from common.tests.model_cases import save_case
from common.tests.paged_harness import PagedHarness
from common.tests.sharded_rank import Communication, run_rank

NUM_PROCESSES, LIMIT_S = 4, 300
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6], [53, 58, 88, 0, 44], [7])
# A chunk that needs no logits; the rest of its prompt and another's first chunk; both prompts'
# ends; a new prompt beside a decode.
STEPS = [
    ([(0, 0, PROMPTS[0][:3])], []),
    ([(0, 3, PROMPTS[0][3:5]), (1, 0, PROMPTS[1][:4])], [5]),
    ([(0, 5, PROMPTS[0][5:7]), (1, 4, PROMPTS[1][4:])], [1, 2]),
    ([(2, 0, PROMPTS[2]), (0, 7, PROMPTS[0][7:])], None),
]
CASES = ("qwen3", "qwen3-biases", "qwen2-untied", "llama3-scaling", "llama-biases")
CASES += ("gemma3", "qwen3-moe", "mixtral")
# First process, ranks of a stage, stages, cases. The last world has all processes.
WORLDS = {
    "2 ranks": (0, 2, 1, CASES),
    "2 stages": (2, 1, 2, ("qwen3", "qwen2-untied", "llama-biases", "mixtral")),
    "3 stages": (1, 1, 3, ("qwen3", "llama-biases", "gemma3")),
    "2 x 2": (0, 2, 2, ("qwen3", "llama-biases", "qwen2-untied", "qwen3-moe")),
    "4 ranks": (0, 4, 1, ("qwen3", "llama-biases", "llama3-scaling", "gemma3", "mixtral")),
}
# In float32, packed and plain, and bfloat16 too; the others in float64 only.
IN_EVERY_DTYPE = ("qwen3", "llama-biases")
BOUNDS = {"torch.float64": 1e-12, "torch.float32": 2e-4, "packed": 2e-4}
ITEMSIZES = {"torch.float64": 8, "torch.float32": 4, "packed": 4, "torch.bfloat16": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """With the checkpoints. 89 tokens: the last of 2 and of 4 ranks has fewer."""
    folder = tmp_path_factory.mktemp("ranks")
    for seed, name in enumerate(CASES):
        save_case(name, folder / name, seed)
    return folder


@pytest.fixture(scope="module")
def adapted(folder) -> dict[str, dict[str, list[int]]]:
    """Prompts by the directories of their adapters, for models of 2 and of 1 KV heads."""
    found = {}
    for name in ("qwen3", "llama3-scaling"):
        paths = [
            save_adapter(folder / name, folder / f"{name} {kind}", **KINDS[kind])
            for kind in ("everything", "attention")
        ]
        found[name] = dict(zip(map(str, paths), PROMPTS))
    return found


@pytest.fixture(scope="module")
def ranks(folder, adapted) -> list[dict]:
    """The saved results by process."""
    plan = {"num_processes": NUM_PROCESSES, "steps": STEPS, "worlds": WORLDS}
    plan |= {"in_every_dtype": IN_EVERY_DTYPE, "adapted": adapted}
    processes = [Forked(run_rank, folder, plan, rank) for rank in range(NUM_PROCESSES)]
    try:
        assert [process.wait(LIMIT_S) for process in processes] == [0] * NUM_PROCESSES
    finally:
        for process in processes:
            process.kill()
    return [torch.load(folder / f"{rank}.pt") for rank in range(NUM_PROCESSES)]


@pytest.fixture(scope="module")
def one_process(folder) -> dict[str, list[torch.Tensor]]:
    models = {name: load_model(folder / name, torch.float64).model for name in CASES}
    harnesses = {name: PagedHarness(model, 3) for name, model in models.items()}
    return {name: [harnesses[name].step(*step) for step in STEPS] for name in CASES}


def each_rank(ranks: list[dict]):
    """(world, its ranks, case, kind of numbers, what the rank got), for all of them."""
    for world, (first, tp_size, num_stages, cases) in WORLDS.items():
        for rank in range(tp_size * num_stages):
            for case in cases:
                grid = Ranks(tp_size, num_stages, rank)
                got = ranks[first + rank][world][case]
                assert len(got) == (len(ITEMSIZES) if case in IN_EVERY_DTYPE else 1)
                for kind, steps in got.items():
                    yield world, grid, case, kind, steps


def assert_near(found: torch.Tensor, expected: torch.Tensor, bound: float, context: tuple) -> None:
    assert found.shape == expected.shape, context
    assert ((found - expected).abs() < bound).all(), context


@pytest.mark.net
def test_logits_are_those_of_one_process(ranks, one_process):
    """Every rank of the last stage has the same bits. Stages alone compute the same numbers in the
    same order as one process: not a bit is another."""
    first: dict = {}
    for world, grid, case, kind, steps in each_rank(ranks):
        for i, (step, expected) in enumerate(zip(steps, one_process[case], strict=True)):
            if not grid.is_last_stage:
                continue
            output = step["output"]
            context = (world, grid, case, kind)
            assert torch.equal(output, first.setdefault((world, case, kind, i), output)), context
            if kind in BOUNDS:
                assert_near(output, expected, BOUNDS[kind], context)
            if grid.tensor_parallel_size == 1 and kind == "torch.float64":
                assert torch.equal(output, expected), context


def test_communication_follows_the_formula(ranks, folder):
    """Two all-reduces a layer, one for the embedding, one gather."""
    for world, (first, tp_size, num_stages, _) in WORLDS.items():
        for rank in range(tp_size * num_stages):
            least = ranks[first + rank][world]["least"]
            assert least == 100 - (tp_size * num_stages - 1), "of all stages"
    for world, grid, case, kind, steps in each_rank(ranks):
        fields = json.loads((folder / case / "config.json").read_text())
        config = ModelConfig.from_hf(fields)
        for (work, indices), step in zip(STEPS, steps, strict=True):
            num_tokens = sum(len(ids) for _, _, ids in work)
            num_rows = num_tokens if indices is None else len(indices)
            expected = step_communication(config, grid, num_tokens, num_rows, ITEMSIZES[kind])
            assert Communication(**step["said"]) == expected, (world, grid, case, kind)


def step_communication(
    config: ModelConfig, ranks: Ranks, num_tokens: int, num_logit_rows: int, itemsize: int
) -> Communication:
    """The communication of one rank in one step, by the formula of README.md; `itemsize` in bytes.

    In the last layer, only the rows that need logits go on after attention."""
    row_bytes = config.hidden_size * itemsize
    expected = Communication()
    if ranks.tensor_parallel_size > 1:
        num_rows = [num_tokens] * (2 * len(ranks.layers(config.num_hidden_layers)))
        num_rows += [num_tokens] * ranks.is_first_stage
        if ranks.is_last_stage:
            num_rows[:2] = [num_logit_rows] * 2
            num_lanes = rows_per_rank(config.vocab_size, ranks.tensor_parallel_size)
            expected.num_all_gathers = 1
            expected.num_bytes += num_logit_rows * num_lanes * itemsize
        expected.num_all_reduces = len(num_rows)
        expected.num_bytes += sum(num_rows) * row_bytes
    if not ranks.is_last_stage:
        expected.num_sends = 1
        expected.num_bytes += num_tokens * row_bytes
    return expected


def test_adapters_on_more_ranks_than_kv_heads_equal_peft(ranks, folder, adapted):
    """And nothing more is said between them."""
    for name, prompts in adapted.items():
        num_tokens = sum(map(len, prompts.values()))
        config = ModelConfig.from_hf(json.loads((folder / name / "config.json").read_text()))
        assert config.num_key_value_heads < NUM_PROCESSES
        exact = [
            with_peft(folder / name, Path(path))(torch.tensor([ids])).logits[0]
            for path, ids in prompts.items()
        ]
        for rank, got in enumerate(ranks):
            found = got["adapted"][name]
            grid = Ranks(NUM_PROCESSES, 1, rank)
            assert_near(found["output"], torch.cat(exact), 1e-11, (name, rank))
            traffic = step_communication(config, grid, num_tokens, num_tokens, 8)
            assert Communication(**found["said"]) == traffic


def test_tokens_123_and_6789_on_two_ranks(ranks):
    """The example of the post on nano-vLLM: a vocabulary of 10,000, half of it on each rank."""
    for rank in range(2):
        example = ranks[rank]["2 ranks"]["embedding"]
        assert torch.equal(example["found"], example["wanted"])


def test_a_rank_that_does_not_come_is_an_error_and_a_pause_is_none(ranks):
    for rank, got in enumerate(ranks):
        assert got["late"]["after a pause"] == [4.0, 4.0], rank
        for kind, call in (("late", "all_reduce"), ("gone", "all_gather")) if rank < 3 else ():
            assert f"rank {rank} of 4: {call} failed" in got["late"][kind]
    # The rank that waits longest may learn of it from ranks that have timed out.
    assert any("1500ms" in got["late"]["late"] for got in ranks[:-1])
