"""Both ways of the runner against full recomputation and against transformers' `generate`."""

from __future__ import annotations

import math
import random
from functools import partial

import pytest
import torch
from transformers import Lfm2Config, Lfm2ForCausalLM

from bounded_loops import as_long_as
from engine_core import EngineCore
from fcfs_scheduler import FCFSScheduler
from hf_model_runner import HFModelRunner, sample_greedy
from input_batch import InputBatch
from request import Request, SamplingParams
from scheduler_interface import NO_FINITE_LOGITS
from test_engine_core import run

BOTH_WAYS = pytest.mark.parametrize("batched", [True, False], ids=["batched", "one by one"])
VOCAB_SIZE = 61


@pytest.fixture(params=["qwen3", "llama"])
def model(request):
    return request.getfixturevalue(request.param)


def batch_of(rows: dict[str, tuple[list[int], int]]) -> InputBatch:
    """`{req_id: (all its tokens, the position where this step starts)}`."""
    starts = [start for _, start in rows.values()]
    computed = [tokens[start:] for tokens, start in rows.values()]
    return InputBatch(list(rows), computed, starts)


@torch.inference_mode()
def recompute(model, tokens: list[int]) -> torch.Tensor:
    """Recompute the logits after the last token from scratch."""
    return model(torch.tensor([tokens]), use_cache=False).logits[0, -1]


def random_tokens(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(length)]


@pytest.mark.net
@pytest.mark.sample
@BOTH_WAYS
@pytest.mark.parametrize("seed", range(3))
def test_logits_equal_those_of_full_recomputation(model, batched, seed, request):
    """Traps 29 and 32, and every mix: rows come and go, and each computes between 1 and 6 tokens
    from its own position on, prompts and single tokens side by side. Trap 35: padding touches no
    row; the memory that PyTorch does not initialise is NaN."""
    torch.use_deterministic_algorithms(True)
    request.addfinalizer(partial(torch.use_deterministic_algorithms, False))
    rng = random.Random(seed)
    runner = HFModelRunner(model, batched)
    tokens: dict[str, list[int]] = {}
    for step in range(10):
        if tokens and rng.random() < 0.4:
            freed = rng.choice(sorted(tokens))
            del tokens[freed]
            runner._caches.pop(freed, None)
        for i in range(rng.randint(0 if tokens else 1, 2)):
            tokens[f"{step}.{i}"] = []
        rows = {}
        for req_id in rng.sample(sorted(tokens), rng.randint(1, len(tokens))):
            start = len(tokens[req_id])
            tokens[req_id] += random_tokens(rng, rng.choice([1, 1, 2, 6]))
            rows[req_id] = (tokens[req_id], start)
        logits = dict(zip(rows, runner.forward(batch_of(rows)), strict=True))
        for req_id in rows:
            expected = recompute(model, tokens[req_id])
            torch.testing.assert_close(logits[req_id], expected, atol=1e-9, rtol=1e-9, msg=seed)
            assert runner.num_computed_tokens(req_id) == len(tokens[req_id])


PROMPTS = [random_tokens(random.Random(length), length) for length in (1, 2, 3, 5, 8, 12)]


@pytest.mark.net
@pytest.mark.sample
@BOTH_WAYS
@pytest.mark.parametrize("seed", range(4))
def test_tokens_equal_those_of_generate_under_random_arrivals(model, oracle, batched, seed):
    """Every stop condition, every small limit, ids that are used again, aborts at random steps: an
    aborted request has a prefix of its tokens. Traps 19, 29 and 49."""
    rng = random.Random(seed)
    requests: list[Request] = []
    expected: list[list[int]] = []
    for i in range(9):
        prompt = rng.choice(PROMPTS)
        max_tokens = rng.randint(1, 12)
        tokens = oracle(model, prompt, max_tokens)
        eos = rng.sample(range(VOCAB_SIZE), 4)
        ends = [k + 1 for k, token in enumerate(tokens) if token in eos]
        expected.append(tokens[: ends[0]] if ends else tokens)
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        requests.append(Request(str(i % 4), prompt, params, eos_token_ids=eos))
    runner = HFModelRunner(model, batched)
    scheduler = FCFSScheduler(
        max_num_seqs=rng.choice([1, 3, 64]), max_num_batched_tokens=rng.choice([12, 20, 200])
    )
    engine = EngineCore(scheduler, runner)
    waiting = list(requests)
    for _ in as_long_as(lambda: waiting or engine.has_unfinished_requests()):
        for _ in range(rng.randint(0, 3)):
            if waiting and waiting[0].request_id not in scheduler.requests:
                engine.add_request(waiting.pop(0))
        if rng.random() < 0.1 and scheduler.requests:
            engine.abort_request(rng.choice(sorted(scheduler.requests)))
        engine.step()
        held = {i: runner.num_computed_tokens(i) for i in scheduler.running}
        assert held == {i: r.num_computed_tokens for i, r in scheduler.running.items()}
    for request, tokens in zip(requests, expected, strict=True):
        if request.finish_reason == "abort":
            tokens = tokens[: request.num_output_tokens]
        assert request.output_token_ids == tokens, f"seed {seed}, request {request.request_id}"
    assert engine.step() == []
    assert not runner._caches, "KV of finished requests is still held"


@pytest.mark.parametrize(("batched", "num_calls", "num_copied"), [(True, 2, 26), (False, 4, 14)])
def test_one_call_of_the_model_per_step_or_one_per_request(qwen3, batched, num_calls, num_copied):
    """And the bytes copied, by hand. A token's KV: 2 layers x 2 (K and V) x 2 heads x 8 values x 8
    bytes = 512 bytes. Step 1 computes 5 and 1 tokens: 6 written, nothing to stack. Step 2 computes
    one each: appending writes 6 and 2 positions again, and 2 rows x (5 + 1) columns are stacked."""
    runner = HFModelRunner(qwen3, batched)
    runner.forward(batch_of({"a": ([1, 2, 3, 4, 5], 0), "b": ([6], 0)}))
    assert runner.num_bytes_copied == runner.num_bytes_new == 512 * 6
    runner.forward(batch_of({"a": ([1] * 6, 5), "b": ([6, 8], 1)}))
    assert runner.num_model_calls == num_calls
    assert (runner.num_bytes_new, runner.num_bytes_copied) == (512 * 8, 512 * num_copied)


@BOTH_WAYS
def test_kv_that_is_kept_is_no_view_of_the_batch(qwen3, batched):
    """Trap 9: a short row beside a long one must not keep the long one's memory alive."""
    runner = HFModelRunner(qwen3, batched)
    runner.forward(batch_of({"a": ([1] * 40, 0), "b": ([6], 0)}))
    for layer in runner._caches["b"].layers:
        for tensor in (layer.keys, layer.values):
            assert tensor.shape[2] == 1
            assert tensor.untyped_storage().nbytes() == tensor.nbytes


@BOTH_WAYS
def test_a_row_that_does_not_follow_its_kv_is_refused(qwen3, batched):
    """Trap 29: one off, and the text would be fluent and wrong. Traps 19 and 24: nor may a request
    start again, for this runner knows no preemption. Nothing has been computed then."""
    runner = HFModelRunner(qwen3, batched)
    runner.forward(batch_of({"a": ([1, 2, 3], 0)}))
    calls = runner.num_model_calls
    for start in (0, 2, 4):
        rows = {"b": ([1], 0), "a": ([1, 2, 3, 4, 5], start)}
        with pytest.raises(ValueError, match=f"'a'.*position {start}.*held for 3"):
            runner.forward(batch_of(rows))
    assert runner.num_model_calls == calls
    assert set(runner._caches) == {"a"}


def test_a_past_of_another_kind_is_refused_batched_and_right_one_by_one(oracle):
    """Between attention layers, one that keeps its last few inputs and no keys."""
    torch.manual_seed(2)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"vocab_size": VOCAB_SIZE, "intermediate_size": 16, "eos_token_id": None}
    kinds = ["full_attention", "conv", "full_attention"]
    config = Lfm2Config(**sizes, num_hidden_layers=3, layer_types=kinds, initializer_range=0.6)
    model = Lfm2ForCausalLM(config).to(torch.float64).eval()
    with pytest.raises(ValueError, match=r"batched must be False.*LinearAttentionLayer"):
        HFModelRunner(model)
    requests = [Request.from_tokens("a", [1, 2, 3], 12), Request.from_tokens("b", [4] * 7, 12)]
    run(EngineCore(FCFSScheduler(), HFModelRunner(model, batched=False)), *requests)
    for request in requests:
        assert request.output_token_ids == oracle(model, request.prompt_token_ids, 12)


@pytest.mark.parametrize("row", [[0, math.nan, 1], [0, math.inf, 1], [-math.inf] * 3], ids=str)
def test_the_greedy_sampler_samples_no_token_from_a_row_without_a_finite_maximum(row):
    logits = torch.tensor([row, [3.0, 0.0, 1.0], [0.0, 2.0, 1.0]])
    output = sample_greedy(logits, ["b", "a", "c"])
    assert output.token_ids == {"a": [0], "c": [1]}
    assert output.errors == {"b": NO_FINITE_LOGITS}
    with pytest.raises(ValueError):
        sample_greedy(logits, ["b"])
