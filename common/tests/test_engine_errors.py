"""Bad input is refused with a sentence that names the field, and leaves everything else as it
was."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from common.engine import EngineConfig, LLMEngine
from common.tests.engine_oracle import Oracle, checked_engine, finish
from kv_connector import KVConnector
from request import SamplingParams
from scheduler_interface import SchedulerOutput
from tiered_cache import KVTierConfig

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


REFUSED: list[tuple] = [  # prompts, parameters, what is said
    ([], GREEDY, "prompt must"),
    ([1.5], GREEDY, ", got 1.5"),
    ([3, True, 5], GREEDY, ", got True"),
    (["a"], GREEDY, ", got 'a'"),
    (np.array([3, 97]), GREEDY, ", got 97"),
    (np.array([3, -1]), GREEDY, ", got -1"),
    ([np.int64(3), np.int64(2**62)], GREEDY, "4611686018427387904"),
    (np.array([3, 1.5]), GREEDY, ", got 3.0"),
    (np.array([True]), GREEDY, ", got True"),
    (np.array([[3]]), GREEDY, ", got [3]"),
    (np.array(3), GREEDY, ", got ndarray"),
    (np.array([], dtype=int), GREEDY, ", got array([]"),
    (torch.tensor([0.5]), GREEDY, ", got 0.5"),
    (None, GREEDY, ", got NoneType"),
    ({1: 2}, GREEDY, ", got dict"),
    ("text", GREEDY, "no tokenizer"),
    (b"abc", GREEDY, ", got bytes"),
    ([1] * 128, GREEDY, "max_model_len=128"),
    ([1] * 49, GREEDY, "max_num_batched_tokens=48"),
    *(([1], bad, "sampling_params must") for bad in (5, "greedy", {"temperature": 0})),
    ([1], SamplingParams(stop="x"), "stop"),
    ([1], SamplingParams(stop_token_ids=[97]), "stop_token_ids must"),
]


@pytest.fixture
def engine(random_loaded) -> LLMEngine:
    limits = dict(max_num_seqs=2, max_num_batched_tokens=48, max_model_len=128)
    sizes = dict(block_size=4, num_blocks=1 + 16, chunked_prefill=False)
    return checked_engine(random_loaded, **limits, **sizes)


def test_refused_requests_change_nothing(engine: LLMEngine, random_oracle: Oracle) -> None:
    engine.add_request("good", random_oracle.prompts[3], GREEDY)
    for _ in range(3):
        engine.step()
    of_the_clock = {"recent_prompt_throughput": 0.0, "recent_output_throughput": 0.0}
    before = replace(engine.stats(), **of_the_clock)
    for prompt, params, named in REFUSED:
        with pytest.raises(ValueError) as error:
            engine.add_request("bad", prompt, params)
        assert named in str(error.value)
        engine.check_invariants()
    assert replace(engine.stats(), **of_the_clock) == before
    said = str(before)
    (output,) = finish(engine).values()
    assert output.outputs[0].token_ids == random_oracle.expected(3, 8)
    assert str(before) == said, "the next steps are not in it"


@pytest.mark.parametrize("scheduler", ["fcfs", "two_phase"])
def test_the_longest_request_that_fits_the_pool_runs_and_one_token_more_does_not(
    scheduler: str, random_loaded
) -> None:
    """Trap 16: never queued for ever, never an assertion in the loop. Who reserves everything has
    to refuse it; who preempts ends it when the memory ends, and says so."""
    config = EngineConfig(block_size=4, num_blocks=1 + 16, scheduler=scheduler)
    engine = LLMEngine(config, loaded=random_loaded)
    why = None
    for max_tokens in (64 - 40 + 1, 26):  # 64 positions: the last token needs none
        params = replace(GREEDY, max_tokens=max_tokens)
        if scheduler == "fcfs" and why:
            with pytest.raises(ValueError, match=r"do not fit.*num_blocks"):
                engine.add_request("more", [1] * 40, params)
            break
        (output,) = engine.generate_batch([[1] * 40], params).values()
        (completion,) = output.outputs
        assert (len(completion.token_ids), completion.finish_reason) == (25, "length")
        assert output.metrics.finish_detail == why
        assert engine.stats().steps_by_tokens[0] >= 24, "steps of one token"
        why = "the KV memory holds 64 positions"
    with pytest.raises(ValueError, match=r"64 positions|num_blocks"):
        engine.add_request("much more", [1] * 65, params)


BAD_FIELDS: dict[str, tuple] = {
    "model": (5, ""),
    "device": ("tpu", "nonsense:9", None),
    "seed": ("x",),
    "block_size": (0, 2.0, True, 10**12),
    "num_blocks": (1, 10**9, 10**18),
    "gpu_memory_utilization": (0, -0.1, 1.01, True, "0.9", nan, None),
    "max_num_seqs": (0, 10**12),
    "max_num_batched_tokens": (-5,),
    "max_model_len": (1, 100_000),
    "scheduler": ("magic",),
    "chunked_prefill": (0, None, 1.5),
    "target_step_ms": (0, True, inf, nan, "fast"),
    "mixing": (1, True),
    "max_long_partial_prefills": (0, 1),
    "attention_backend": ("flash",),
    "compile": ("always", 1),
    "tensor_parallel_size": (0,),
    "pipeline_parallel_size": (True,),
    "num_threads": (10**9, 0),
    "check_invariants": ("no",),
    "shuffle_batch": (1,),
    "speculative": ({"method": "draft", "model": 5},),
}


@pytest.mark.parametrize("field", BAD_FIELDS)
def test_bad_configuration_names_the_field(field: str, random_oracle: Oracle) -> None:
    for value in BAD_FIELDS[field]:
        config = {"model": random_oracle.path, "num_blocks": 8, field: value}
        with pytest.raises(ValueError, match="^model must" if field == "speculative" else field):
            LLMEngine(EngineConfig(**config))


def test_a_device_beyond_those_that_there_are_is_refused_beside_a_gpu(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert EngineConfig(device="cuda:0").resolve_device().index == 0
    with pytest.raises(ValueError, match="device must be below 'cuda:1', got 'cuda:99'"):
        EngineConfig(device="cuda:99").resolve_device()


NGRAM = {"method": "ngram"}
AT_ODDS: list[tuple[str, dict]] = [
    ("preempt_every", dict(preempt_every=0)),
    *(("events must", dict(events=value)) for value in ("", 5, b"x")),
    *(("watermark", dict(watermark=value)) for value in (1.0, True)),
    ("kv_tiers", dict(kv_tiers=3)),
    ("kv_connector", dict(kv_connector="pool")),
    (
        "kv_connector must be None",
        dict(kv_connector=Mock(spec=KVConnector), kv_tiers=KVTierConfig(1)),
    ),
    ("method", dict(speculative={})),
    *(("num_spec_tokens", dict(speculative=NGRAM | {"num_spec_tokens": n})) for n in (0, True)),
    ("'k'", dict(speculative=NGRAM | {"k": 3})),
    ("min_ngram", dict(speculative=NGRAM | {"min_ngram": 5})),
    ("model", dict(speculative=NGRAM | {"model": "there"})),
    ("adaptive", dict(speculative={"method": "draft", "adaptive": 1})),
    ("policy", dict(scheduler="fcfs", policy="lpm")),
    ("preempt_every", dict(scheduler="fcfs", preempt_every=2)),
    ("fcfs", dict(scheduler="fcfs", speculative=NGRAM)),
    ("chunked_prefill", dict(scheduler="fcfs", chunked_prefill=64)),
    ("mixing", dict(scheduler="fcfs", mixing=True)),
    ("target_step_ms", dict(scheduler="fcfs", target_step_ms=5)),
    ("target_step_ms", dict(chunked_prefill=False, target_step_ms=5)),
]
LONG_PREFILLS = dict(scheduler="prefill_first", chunked_prefill=64, max_long_partial_prefills=1)


def test_what_is_wrong_or_does_not_go_together_is_refused() -> None:
    for named, options in (*AT_ODDS, ("max_long_partial_prefills", LONG_PREFILLS)):
        with pytest.raises(ValueError, match=named):
            EngineConfig(**options)


# -- a scheduler that admits nobody


def test_who_is_never_admitted_ends_with_an_error_and_not_in_an_endless_loop(
    engine: LLMEngine, monkeypatch
) -> None:
    def on_step(record) -> None:
        assert record.step < 400, "it hangs"

    engine.on_step = on_step
    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, "schedule", SchedulerOutput)
        with pytest.raises(RuntimeError, match=r"admitted none of 'request-0', 'request-1'$"):
            engine.generate_batch([[1, 2], [3]], GREEDY)
        engine.add_request("a", [1, 2], GREEDY)
        with pytest.raises(RuntimeError, match=r"admitted none of 'a'$"):
            finish(engine)
    # Only the scheduler was at fault, and who comes is served; so is who waits less, but often.
    for num_idle in (0, 40, 40, 40):
        engine.add_request("c", [4], GREEDY)
        with monkeypatch.context() as patch:
            patch.setattr(engine.scheduler, "schedule", SchedulerOutput)
            for _ in range(num_idle):
                engine.step()
        assert "c" in finish(engine)
