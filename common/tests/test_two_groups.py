"""Layers in two groups: each request has two block tables, from the scheduler to the model."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from block_pool import BlockPool
from bounded_loops import as_long_as
from chunk_policy import ChunkedPrefill
from common.assembly import Given, make_state
from common.engine_config import EngineConfig
from common.loader import load_model
from common.parallel import message
from common.runner.batch_state import BatchState
from common.runner.model_runner import PagedModelRunner
from common.sampling.sampler import Sampler
from common.sampling.sampling_columns import SamplingColumns
from common.tests.model_cases import reference_logits, save_case
from common.tests.two_groups import GroupsDelta, TwoGroups, TwoGroupsBackend, compose_two_groups
from engine_core import EngineCore
from paged_attention import PagedKVCache
from request import Request, SamplingParams
from scheduler import Scheduler
from scheduler_interface import PlanMessage, StepHandle

pytestmark = pytest.mark.usefixtures("one_thread")


def make_scheduler(memory: TwoGroups, **limits: int) -> Scheduler:
    scheduler = Scheduler(kv_memory=memory, chunk_policy=ChunkedPrefill(), watermark=0.0, **limits)
    scheduler.delta = GroupsDelta(memory)
    return scheduler


def through(plan: PlanMessage) -> PlanMessage:
    """What arrives in another process."""
    data = message.pack("plan", plan=message.plan_to_map(plan))
    return message.plan_from_map(message.unpack(data, {"plan": ("plan",)})[1]["plan"])


def tables_of(memory: TwoGroups, request_id: str) -> list[list[int]]:
    return [list(group.get_block_ids(request_id)) for group in memory.groups]


WINDOW, VOCABULARY, MAX_LEN = 5, 89, 48
KINDS = ["full_attention", "sliding_attention", "full_attention"]
WINDOWED = {"layer_types": KINDS, "sliding_window": WINDOW, "use_sliding_window": True}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_case("qwen2", tmp_path_factory.mktemp("qwen2"))


class Travelling:
    """A runner that gets what arrives. It counts what has moved."""

    def __init__(self, runner: PagedModelRunner, memory: TwoGroups) -> None:
        self.runner, self.memory = runner, memory
        self.num_given_up = self.num_resumed = 0

    def execute(self, plan: PlanMessage) -> StepHandle:
        arrived = through(plan)
        self.num_given_up += len(arrived.block_moves)
        self.num_resumed += len(arrived.scheduled_cached_reqs.resumed_req_ids)
        handle = self.runner.execute(arrived)
        for name in plan.num_scheduled_tokens:
            tables = tables_of(self.memory, name)
            assert [self.runner.state.block_ids(name, group=g) for g in (0, 1)] == tables
            assert set(tables[0]).isdisjoint(tables[1])
        return handle


def make_core(
    path: Path, block_size: int, num_blocks: int
) -> tuple[EngineCore, Scheduler, Travelling]:
    loaded = load_model(path, torch.float64)
    loaded.model.layers[1].attention.group = 1
    memory = TwoGroups(BlockPool(num_blocks), block_size, WINDOW)
    shape = num_blocks, block_size, loaded.model.num_kv_heads, loaded.config.head_dim
    kv_cache = PagedKVCache(loaded.model.num_layers, *shape, torch.float64)
    for cache in (*kv_cache.key_cache, *kv_cache.value_cache):
        cache.fill_(torch.nan)  # of the null block, too
    columns, num_groups = SamplingColumns(), loaded.model.num_groups
    state = BatchState(3, -(-MAX_LEN // block_size), columns, num_groups=num_groups)
    parts = loaded.model, kv_cache, TwoGroupsBackend(), state, Sampler(VOCABULARY)
    compose = partial(compose_two_groups, window=WINDOW)
    runner = Travelling(PagedModelRunner(*parts, compose, shuffle_seed=0), memory)
    scheduler = make_scheduler(memory, max_num_seqs=3, max_num_batched_tokens=8)
    return EngineCore(scheduler, runner), scheduler, runner


@pytest.mark.parametrize("block_size, num_blocks", [(1, 66), (3, 23), (4, 17)])
def test_greedy_tokens_are_those_of_transformers(block_size, num_blocks, checkpoint) -> None:
    """A window in the middle layer, whose blocks are given up behind it: chunks, decodes and
    preempted requests in one batch, and one that is aborted. Every slot that nobody may read holds
    NaN."""
    rng = random.Random(block_size)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(n)] for n in (21, 3, 9, 14, 6)]
    core, scheduler, runner = make_core(checkpoint, block_size, num_blocks)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    requests = [Request(f"r{i}", prompt, params) for i, prompt in enumerate(prompts)]
    for request in [Request("gone", prompts[2], params), *requests]:
        core.add_request(request)
    for step, _ in enumerate(as_long_as(core.has_unfinished_requests)):
        core.step()
        if step == 3:
            assert scheduler.requests["gone"].num_computed_tokens > 0
            core.abort_request("gone")
        if rng.random() < 0.2 and scheduler.running:
            scheduler.preempt(rng.choice([*scheduler.running.values()]))
        scheduler.check_invariants()
        runner.memory.check_invariants(scheduler.running.values())
    assert runner.num_given_up > 10 and runner.num_resumed > 0
    assert runner.memory.pool.num_free_blocks == num_blocks - 1
    sequences = [request.all_token_ids for request in requests]
    windowed = reference_logits(checkpoint, torch.float64, sequences, **WINDOWED)
    plain = reference_logits(checkpoint, torch.float64, sequences)
    num_different = 0
    for prompt, sequence, logits, others in zip(prompts, sequences, windowed, plain, strict=True):
        first = len(prompt) - 1
        assert sequence[len(prompt) :] == logits[first:-1].argmax(-1).tolist()
        num_different += (logits.argmax(-1) != others.argmax(-1))[first:-1].sum().item()
    assert num_different > 0, "the window changes nothing"


def test_the_runner_has_the_tables_that_the_model_reads(random_loaded, monkeypatch) -> None:
    own = SimpleNamespace(config=EngineConfig(), loaded=random_loaded, max_model_len=64)
    given = cast(Given, own)
    assert len(make_state(given).groups) == random_loaded.model.num_groups == 1
    monkeypatch.setattr(random_loaded.model.layers[0].attention, "group", 1)
    assert len(make_state(given).groups) == random_loaded.model.num_groups == 2
