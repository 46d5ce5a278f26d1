"""Whole steps of an engine, on a device that is none: each has one copy to it and one from it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from batch_layout import ComposedBatch
from common.engine import LLMEngine
from common.runner import overlap
from common.tests.engine_oracle import checked_engine, paged_runner
from common.tests.pretend_device import PretendDevice, pretend_device
from request import SamplingParams
from scheduler_interface import FinishedStep, RunnerInput, StepHandle

LONG = dict(max_tokens=7, ignore_eos=True)
KINDS = {
    "greedy": SamplingParams(temperature=0, **LONG),
    "plain": SamplingParams(**LONG),
    "seeded": SamplingParams(seed=1, **LONG),
    "wide top-k": SamplingParams(top_k=300, **LONG),
    "limits": SamplingParams(top_k=5, top_p=0.9, min_p=0.1, seed=2, **LONG),
    "penalties": SamplingParams(repetition_penalty=1.3, frequency_penalty=0.3, **LONG),
    "min_tokens": SamplingParams(min_tokens=5, stop_token_ids=[3, 4], **LONG),
    "log-probabilities": SamplingParams(logprobs=3, **LONG),
    "rules": SamplingParams(
        **dict(allowed_token_ids=range(40), logit_bias={7: 3.0}, top_k=9, seed=1, **LONG),
        bad_words=[[5], *([i, j] for i in range(9) for j in range(i))],
    ),
}
BATCHES = {"greedy": [KINDS["greedy"]], "mixed": list(KINDS.values())}


def plain(x: Any) -> Any:
    """A copy that is on no device: what a kernel gets from it, nobody waits for."""
    if isinstance(x, torch.Tensor):
        return x.detach().clone()
    if hasattr(x, "block_tables"):  # metadata of attention
        return type(x)(**{f.name: plain(getattr(x, f.name)) for f in fields(x) if f.init})
    return x


class OnDevice:
    """A model that is computed there, attention and its plan and all. How it does that is tested
    elsewhere (`test_fake_decode.py`)."""

    def __init__(self, owner: Any, device: PretendDevice) -> None:
        """`owner`, a runner or a proposer, has it instead of its own from now on."""
        self.model, self.device, self.backend = owner.model, device, owner.backend
        owner.model, owner.backend = self, self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def plan(self, metadata: Any, num_heads: int, key_cache: torch.Tensor) -> Any:
        """Later, where it is no read."""
        return None

    def __call__(self, batch: ComposedBatch, kv_cache: Any) -> torch.Tensor:
        (where,) = batch.attention
        parts = batch.input_ids, batch.positions, batch.logit_indices
        for x in (*parts, where.seq_lens, where.slot_mapping):
            assert getattr(x, "place", None) == "device"
        with _disable_current_modes():
            ids, positions, rows = map(plain, parts)
            there = ComposedBatch(ids, positions, (plain(where),), rows)
            there.plan_attention(self.backend, self.model.num_heads, kv_cache)
            logits = self.model(there, kv_cache)
        return self.device.put(logits)


class Counted:
    """A `ModelRunner` around the outermost one. Of each plan in which somebody computes: the copies
    to the device, and whether guesses were made."""

    def __init__(self, runner: Any, device: PretendDevice) -> None:
        self.runner, self.device, self.steps, self.num_drafts = runner, device, [], 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def execute(self, plan: RunnerInput) -> StepHandle:
        before = self.device.uploads
        handle = self.runner.execute(plan)
        if not plan.is_empty:
            has_guessed = isinstance(handle, FinishedStep) and bool(handle.output.draft_token_ids)
            self.steps.append((self.device.uploads - before, has_guessed))
            self.num_drafts += sum(map(len, plan.scheduled_draft_token_ids.values()))
        return handle


def said(engine: LLMEngine, kinds: list[SamplingParams]) -> dict[str, list[int]]:
    """Requests that come one after another."""
    outputs, coming = {}, list(enumerate(kinds * (3 // len(kinds) or 1)))
    while coming or engine.has_unfinished_requests():
        if coming:
            i, params = coming.pop(0)
            engine.add_request(str(i), [5 + i, 7, 5 + i, 7, 5 + i], params)
        outputs |= {o.request_id: o.outputs[0].token_ids for o in engine.step() if o.finished}
    return outputs


GUESSES = {"num_spec_tokens": 3, "adaptive": False}
WAYS: dict[str, dict] = {
    "plain": {},
    "in chunks": {"chunked_prefill": 3},
    "overlap": {"overlap_scheduling": True},
    "n-gram": {"speculative": {"method": "ngram", "min_ngram": 1, **GUESSES}},
    "draft model": {"speculative": {"method": "draft", **GUESSES}},
}


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("way", WAYS)
def test_one_copy_a_step(way: str, kind: str, random_loaded, monkeypatch) -> None:
    """And two with a draft model: its guesses are made in a pass of their own, after the tokens.
    Steps in which requests come are no others: what is new of them goes the same way."""
    config = {"seed": 0, "num_blocks": 200, "block_size": 4, "max_num_seqs": 16} | WAYS[way]
    draft = random_loaded if way == "draft model" else None
    # A queued device has no thread of its own, and modes of PyTorch are a thread's.
    monkeypatch.setattr(overlap, "ThreadedRunner", overlap.QueuedRunner)
    expected = said(checked_engine(random_loaded, draft, **config), BATCHES[kind])
    engine = checked_engine(random_loaded, draft, **config)
    runner = paged_runner(engine)
    with pretend_device(monkeypatch) as device:
        OnDevice(runner, device)
        if draft is not None:
            OnDevice(engine.core.runner.proposer.proposer, device)
        counted = engine.core.runner = Counted(engine.core.runner, device)
        assert said(engine, BATCHES[kind]) == expected
    if way == "draft model" or (way, kind) == ("n-gram", "mixed"):
        assert counted.num_drafts > 0, "the test is of verification"
    drafting = sum(has_guessed for _, has_guessed in counted.steps) if draft is not None else 0
    assert (drafting > 0) == (draft is not None)
    for uploads, has_guessed in counted.steps:
        assert uploads == 1 + (has_guessed and draft is not None)
    assert device.reads == len(counted.steps) + drafting
