"""The baseline: its waste, computed by hand, and the same tokens as every other engine."""

from __future__ import annotations

import random

import pytest
import torch

from engine_core import EngineCore
from fcfs_scheduler import FCFSScheduler
from hf_model_runner import HFModelRunner
from request import Request, RequestStatus, SamplingParams
from static_batching import SlotUse, generate_static, pad_left
from step_record import RecordedScheduler
from test_engine_core import run


def make(request_id: str, num_prompt: int, max_tokens: int, arrival_time: float = 0.0) -> Request:
    prompt = list(range(1, 1 + num_prompt))
    return Request.from_tokens(request_id, prompt, max_tokens, arrival_time=arrival_time)


def drawn(batch) -> list[str]:
    return ["".join(use.value for use in row) for row in batch.timeline]


def test_the_waste_of_a_batch_by_hand(qwen3):
    """Outputs of 3, 7, 1 and then 2 tokens in batches of three: 3 x 7 slot-steps spent on 11
    tokens, then 1 x 2 on 2. Prompts of 4, 2 and 3 are computed as 3 x 4. d arrives last."""
    requests = [make("d", 5, 2, 1.0), make("a", 4, 3), make("b", 2, 7), make("c", 3, 1)]
    report = generate_static(qwen3, requests, batch_size=3)
    first, second = report.batches
    assert drawn(first) == ["Puu....", "Puuuuuu", "P......"]
    assert drawn(second) == ["Pu"]
    assert first.req_ids == ["a", "b", "c"]
    assert (first.start_step, first.num_steps, second.start_step, second.num_steps) == (0, 7, 7, 2)
    assert (first.num_prompt_tokens, first.num_padding_tokens) == (9, 3)
    assert (second.num_prompt_tokens, second.num_padding_tokens) == (5, 0)
    assert (first.slot_steps_spent, first.slot_steps_used) == (21, 11)
    assert (report.num_steps, report.slot_steps_spent, report.slot_steps_used) == (9, 23, 13)
    assert report.slot_utilisation == pytest.approx(13 / 23)


@pytest.mark.parametrize("seed", range(2))
def test_tokens_equal_those_of_generate_and_of_continuous_batching(qwen3, oracle, seed):
    rng = random.Random(seed)
    shapes = [(rng.randint(1, 8), rng.randint(1, 9)) for _ in range(6)]
    static, continuous = (
        [make(str(i), *shape) for i, shape in enumerate(shapes)] for _ in range(2)
    )
    report = generate_static(qwen3, static, batch_size=rng.choice([2, 3, 4]))
    scheduler = RecordedScheduler(FCFSScheduler(max_num_seqs=3))
    engine = EngineCore(scheduler, HFModelRunner(qwen3))
    run(engine, *continuous)
    for mine, theirs in zip(static, continuous):
        assert report.token_ids[mine.request_id] == theirs.output_token_ids, f"seed {seed}"
        expected = oracle(qwen3, mine.prompt_token_ids, mine.max_tokens)
        assert mine.output_token_ids == expected, f"seed {seed}"
    assert report.slot_steps_used == sum(len(tokens) for tokens in report.token_ids.values())
    assert report.num_steps > scheduler.num_steps or report.slot_utilisation == 1


def test_positions_count_a_rows_tokens_without_the_padding_before_them(qwen3):
    """Traps 29 and 32. Rotary positions are relative, so a row that starts at the wrong one gives
    the same tokens, and only a model with learned positions would show it: look at the numbers."""
    seen = []
    hook = qwen3.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["position_ids"].tolist()), with_kwargs=True
    )
    generate_static(qwen3, [make("a", 3, 3), make("b", 1, 2)], batch_size=2)
    hook.remove()
    assert seen == [[[0, 1, 2], [0, 0, 0]], [[3], [1]], [[4], [2]]]


def test_a_batch_of_one_wastes_nothing(qwen3):
    report = generate_static(qwen3, [make(str(i), 2, 1 + i) for i in range(3)], batch_size=1)
    assert report.slot_utilisation == 1
    assert report.num_steps == 1 + 2 + 3


def test_stop_conditions_are_those_of_the_request(qwen3, oracle):
    """Traps 38 and 49: the row that ends goes on computing, and its user sees nothing of it."""
    prompt = [1, 2, 3]
    tokens = oracle(qwen3, prompt, 12)
    end = tokens[4]
    expected = tokens[: tokens.index(end) + 1]
    params = SamplingParams(temperature=0, max_tokens=12)
    eos = Request("eos", prompt, params, eos_token_ids=[999, end], arrival_time=0.0)
    ignores = Request.from_tokens("ignores", prompt, 12, arrival_time=0.0)
    report = generate_static(qwen3, [eos, ignores], batch_size=2)
    assert report.token_ids == {"eos": expected, "ignores": tokens}
    assert eos.status == RequestStatus.FINISHED_STOPPED
    assert ignores.status == RequestStatus.FINISHED_LENGTH_CAPPED
    wasted = sum(use == SlotUse.WASTED for use in report.batches[0].timeline[0])
    assert wasted == 12 - len(expected) > 0


def test_padding_is_on_the_left_and_initialised():
    """Trap 33."""
    torch.use_deterministic_algorithms(True)
    try:
        token_ids, attention_mask = pad_left([[1, 2, 3], [4]], pad_token_id=9)
    finally:
        torch.use_deterministic_algorithms(False)
    assert token_ids.tolist() == [[1, 2, 3], [9, 9, 4]]
    assert attention_mask.tolist() == [[1, 1, 1], [0, 0, 1]]


def test_bad_input_is_refused_before_anything_is_computed(qwen3):
    requests = [make("a", 2, 2), make("a", 3, 2)]
    with pytest.raises(ValueError, match="batch_size must be >= 1, got 0"):
        generate_static(qwen3, requests[:1], batch_size=0)
    with pytest.raises(ValueError, match="unique"):
        generate_static(qwen3, requests, batch_size=2)
    assert all(request.num_output_tokens == 0 for request in requests)
