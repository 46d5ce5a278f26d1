"""The baseline: its waste, computed by hand, and the same tokens as every other engine."""

from __future__ import annotations

from request import Request, SamplingParams
from static_batching import generate_static


def make(request_id: str, num_prompt: int, max_tokens: int, arrival_time: float = 0.0) -> Request:
    prompt = list(range(1, 1 + num_prompt))
    return Request.from_tokens(request_id, prompt, max_tokens, arrival_time=arrival_time)


def test_the_waste_of_a_batch_by_hand(qwen3, oracle):
    """Outputs of 3, 7, 1 and then 2 tokens in batches of three: 3 x 7 slot-steps spent on 11
    tokens, then 1 x 2 on 2. Prompts of 4, 2 and 3 are computed as 3 x 4. d arrives last.

    Traps 29 and 32: a row's positions do not count its padding. They are relative, so only the
    numbers show it."""
    requests = [make("d", 5, 2, 1.0), make("a", 4, 3), make("b", 2, 7), make("c", 3, 1)]
    positions = []
    hook = qwen3.register_forward_pre_hook(
        lambda _module, _args, kwargs: positions.append(kwargs["position_ids"].tolist()),
        with_kwargs=True,
    )
    report = generate_static(qwen3, requests, batch_size=3)
    hook.remove()
    assert positions[:2] == [[[0, 1, 2, 3], [0, 0, 0, 1], [0, 0, 1, 2]], [[4], [2], [3]]]
    first, second = report.batches
    drawn = [row for batch in report.batches for row in batch.timeline]
    assert drawn == ["Puu....", "Puuuuuu", "P......", "Pu"]
    assert first.req_ids == ["a", "b", "c"]
    assert (first.start_step, first.num_steps, second.start_step, second.num_steps) == (0, 7, 7, 2)
    assert (first.num_prompt_tokens, first.num_padding_tokens) == (9, 3)
    assert (report.num_steps, report.slot_steps_spent, report.slot_steps_used) == (9, 23, 13)
    for request in requests:
        expected = oracle(qwen3, request.prompt_token_ids, request.max_tokens)
        assert report.token_ids[request.request_id] == expected == request.output_token_ids


def test_a_row_that_ends_goes_on_computing_and_its_user_sees_nothing_of_it(qwen3, oracle):
    """Traps 38 and 49."""
    tokens = oracle(qwen3, [1, 2, 3], 12)
    params = SamplingParams(temperature=0, max_tokens=12)
    eos = Request("eos", [1, 2, 3], params, eos_token_ids=[999, tokens[4]], arrival_time=0.0)
    report = generate_static(qwen3, [eos, make("ignores", 3, 12)], batch_size=2)
    expected = tokens[: tokens.index(tokens[4]) + 1]
    assert report.token_ids == {"eos": expected, "ignores": tokens}
    assert report.slot_steps_used == len(expected) + 12 < report.slot_steps_spent == 24
