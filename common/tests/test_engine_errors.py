"""Bad input is refused with a sentence that names the field, and leaves everything else as it
was."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import numpy as np
import pytest
import torch

from common.engine import EngineConfig, LLMEngine
from common.tests.engine_oracle import Oracle, checked_engine, finish
from request import SamplingParams
from step_plan import PreemptiveSchedulerOutput

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture
def engine(random_loaded) -> LLMEngine:
    return checked_engine(
        random_loaded,
        block_size=4,
        num_blocks=1 + 16,
        max_num_seqs=2,
        max_num_batched_tokens=48,
        max_model_len=128,
        chunked_prefill=False,
    )


def must_say(engine: LLMEngine, oracle: Oracle, index: int) -> None:
    """The one request that is left says what follows prompt `index`."""
    (output,) = finish(engine).values()
    assert output.outputs[0].token_ids == oracle.expected(index, 8)


@pytest.mark.parametrize(
    ("prompt", "params", "named"),
    [
        ([], GREEDY, "prompt must"),
        ([3, 97], GREEDY, ", got 97"),
        ([-1], GREEDY, ", got -1"),
        ([1.5], GREEDY, ", got 1.5"),
        ([True], GREEDY, ", got True"),
        ([3, True, 5], GREEDY, ", got True"),
        (["a"], GREEDY, ", got 'a'"),
        (np.array([3, 97]), GREEDY, ", got 97"),
        (np.array([3, -1]), GREEDY, ", got -1"),
        ([np.int64(3), np.int64(2**62)], GREEDY, "4611686018427387904"),
        (np.array([3, 1.5]), GREEDY, ", got 3.0"),
        ([3, np.float64(1)], GREEDY, "1.0"),
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
    ],
)
def test_refused_request_changes_nothing(
    engine: LLMEngine,
    random_oracle: Oracle,
    prompt: object,
    params: object,
    named: str,
) -> None:
    engine.add_request("good", random_oracle.prompts[3], GREEDY)
    for _ in range(3):
        engine.step()
    of_the_clock = {"recent_prompt_throughput": 0.0, "recent_output_throughput": 0.0}
    before = replace(engine.stats(), **of_the_clock)
    with pytest.raises(ValueError) as error:
        engine.add_request("bad", prompt, params)
    assert named in str(error.value)
    assert replace(engine.stats(), **of_the_clock) == before
    engine.check_invariants()
    must_say(engine, random_oracle, 3)


@pytest.mark.parametrize("scheduler", ["fcfs", "two_phase"])
def test_the_longest_request_that_fits_the_pool_runs_and_one_token_more_does_not(
    scheduler: str, random_loaded
) -> None:
    """Trap 16: never queued for ever, never an assertion in the loop. Who reserves everything has
    to refuse it; who preempts ends it when the memory ends, and says so."""
    config = EngineConfig(block_size=4, num_blocks=1 + 16, scheduler=scheduler)
    engine = LLMEngine(config, loaded=random_loaded)
    fits = SamplingParams(temperature=0, max_tokens=64 - 40 + 1, ignore_eos=True)
    engine.add_request("fits", [1] * 40, fits)  # 64 positions: the last token needs none
    (output,) = finish(engine).values()
    assert len(output.outputs[0].token_ids) == 25
    assert output.metrics.finish_detail is None
    more = SamplingParams(temperature=0, max_tokens=26, ignore_eos=True)
    if scheduler == "fcfs":
        with pytest.raises(ValueError, match=r"do not fit.*num_blocks"):
            engine.add_request("more", [1] * 40, more)
    else:
        engine.add_request("more", [1] * 40, more)
        (output,) = finish(engine).values()
        assert len(output.outputs[0].token_ids) == 25
        assert output.outputs[0].finish_reason == "length"
        assert output.metrics.finish_detail == "the KV memory holds 64 positions"
    with pytest.raises(ValueError, match=r"64 positions|num_blocks"):
        engine.add_request("much more", [1] * 65, more)


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
    "shuffle_waiting": (None,),
    "speculative": ({"method": "draft", "model": 5},),
}


@pytest.mark.parametrize(("field", "value"), [(f, v) for f in BAD_FIELDS for v in BAD_FIELDS[f]])
def test_bad_configuration_names_the_field(
    field: str, value: object, random_oracle: Oracle
) -> None:
    with pytest.raises(ValueError, match="^model must" if field == "speculative" else field):
        LLMEngine(EngineConfig(**{"model": random_oracle.path, "num_blocks": 8, field: value}))


def test_a_device_beyond_those_that_there_are_is_refused_beside_a_gpu(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert EngineConfig(device="cuda:0").resolve_device().index == 0
    with pytest.raises(ValueError, match="device must be below 'cuda:1', got 'cuda:99'"):
        EngineConfig(device="cuda:99").resolve_device()


@pytest.mark.parametrize(
    ("named", "options"),
    [
        ("preempt_every", {"preempt_every": 0}),
        *(("events must be a file to be written", {"events": value}) for value in ("", 5, b"x")),
        ("watermark", {"watermark": 1.0}),
        ("watermark", {"watermark": True}),
        ("kv_tiers", {"kv_tiers": 3}),
        ("kv_connector", {"kv_connector": "pool"}),
        ("policy", {"scheduler": "fcfs", "policy": "lpm"}),
        ("preempt_every", {"scheduler": "fcfs", "preempt_every": 2}),
        ("fcfs", {"scheduler": "fcfs", "speculative": {"method": "ngram"}}),
        ("method", {"speculative": {}}),
        ("num_spec_tokens", {"speculative": {"method": "ngram", "num_spec_tokens": 0}}),
        ("num_spec_tokens", {"speculative": {"method": "ngram", "num_spec_tokens": True}}),
        ("'k'", {"speculative": {"method": "ngram", "k": 3}}),
        ("min_ngram", {"speculative": {"method": "ngram", "min_ngram": 5}}),
        ("model", {"speculative": {"method": "ngram", "model": "there"}}),
        ("adaptive", {"speculative": {"method": "draft", "adaptive": 1}}),
        ("chunked_prefill", {"scheduler": "fcfs", "chunked_prefill": 64}),
        ("mixing", {"scheduler": "fcfs", "mixing": True}),
        ("target_step_ms", {"scheduler": "fcfs", "target_step_ms": 5}),
        ("target_step_ms", {"chunked_prefill": False, "target_step_ms": 5}),
        (
            "max_long_partial_prefills",
            {"scheduler": "prefill_first", "chunked_prefill": 64, "max_long_partial_prefills": 1},
        ),
    ],
)
def test_what_is_wrong_or_does_not_go_together_is_refused(named: str, options: dict) -> None:
    with pytest.raises(ValueError, match=named):
        EngineConfig(**options)


# -- a scheduler that admits nobody


@pytest.mark.parametrize(
    "serve",
    [
        lambda engine: engine.generate_batch([[1, 2], [3]], GREEDY),
        lambda engine: (engine.add_request("a", [1, 2], GREEDY), finish(engine)),
    ],
    ids=["generate_batch", "step"],
)
def test_who_is_never_admitted_ends_with_an_error_and_not_in_an_endless_loop(
    engine: LLMEngine, monkeypatch, serve
) -> None:
    def on_step(record) -> None:
        assert record.step < 400, "it hangs"

    engine.on_step = on_step
    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, "schedule", PreemptiveSchedulerOutput)
        with pytest.raises(RuntimeError, match=r"admitted none of '(a|request-0', 'request-1)'$"):
            serve(engine)
    # Only the scheduler was at fault: who still waits is served, and who comes.
    engine.add_request("c", [4], GREEDY)
    assert "c" in finish(engine)
