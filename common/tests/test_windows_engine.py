"""Layers that attend to a window, and of two kinds, beyond the array: a draft model, recorded runs,
counted slots, rounding, and what a configuration or a checkpoint may not say."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from cached_kv_cache_manager import CachedKVCacheManager
from common.engine import LLMEngine
from common.engine_config import EngineConfig
from common.models.loader import load_model
from common.models.model_config import ModelConfig
from common.models.regions.compiled_regions import compile_regions
from common.models.regions.regions import Regions
from common.tests.engine_oracle import checked_engine, full_of_nan, greedy_params, serve
from common.tests.film_runs import check_film
from common.tests.film_runs import serve as record_run
from common.tests.model_cases import LINEAR, LOCAL, F, PagedHarness, W, reference_logits
from common.tests.small_models import CPU, Subject, subject
from tiered_cache import KVTierConfig

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=["turns", "windows"])
def which(request: pytest.FixtureRequest) -> Subject:
    return subject(request.param)


def test_a_draft_model_guesses_what_it_says_alone(tmp_path) -> None:
    """It has the target's weights and no windows. Its keys lie where those of layers do that see
    everything; its memory is full of NaN, too."""
    oracle, loaded = subject("turns").oracle, subject("turns").loaded
    path = shutil.copytree(oracle.path, tmp_path / "draft")
    fields = json.loads((path / "config.json").read_text())
    fields |= {"use_sliding_window": False, "layer_types": None}
    (path / "config.json").write_text(json.dumps(fields))
    how = {"method": "draft", "num_spec_tokens": 3, "adaptive": False}
    sizes = dict(block_size=3, num_blocks=90, max_num_batched_tokens=16, preempt_every=5)
    draft = load_model(path, torch.float64, CPU)
    engine = checked_engine(loaded, draft, speculative=how, max_num_seqs=3, **sizes)
    proposer, guesses = full_of_nan(engine).speculation.proposer.proposer, []
    propose = proposer.propose

    def spy(inputs, num_drafts):
        known = {f.request.req_id: f.request.tokens(0, f.request.num_tokens) for f in inputs}
        found = propose(inputs, num_drafts)
        guesses.extend((known[name], tokens) for name, tokens in found.items() if tokens)
        return {name: list(tokens) for name, tokens in found.items()}

    proposer.propose = spy
    serve(engine, oracle, list(range(len(oracle.prompts))), 12)
    assert engine.stats().num_preemptions > 0
    engine.close()
    alone = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    for known, tokens in sorted(guesses, key=lambda guess: -len(guess[0]))[::3]:
        logits = alone(torch.tensor([[*known, *tokens]])).logits[0]
        assert logits[len(known) - 1 : -1].argmax(-1).tolist() == list(tokens)


@pytest.mark.parametrize("first_step", [0, 4])
@pytest.mark.parametrize(
    "config",
    [
        dict(block_size=1, num_blocks=300, max_num_batched_tokens=8, preempt_every=2),
        dict(block_size=4, num_blocks=40, max_num_seqs=3, policy="lpm", overlap_scheduling=True),
        dict(block_size=3, num_blocks=60, speculative={"method": "ngram", "num_spec_tokens": 3}),
    ],
    ids=["chunks", "ahead", "n-gram"],
)
def test_a_film_is_the_engine_whenever_it_begins(config, first_step, which, tmp_path: Path) -> None:
    """Tables of all groups, the free order, and what of which group can be found."""
    path, prompts = tmp_path / "run.jsonl", which.oracle.prompts
    config = {"shuffle_batch": True, "max_num_batched_tokens": 64} | config
    check_film(record_run(path, which.loaded, None, prompts, 1, first_step=first_step, **config))


def test_up_to_the_window_nothing_is_different(which: Subject) -> None:
    oracle, loaded = which.oracle, which.loaded
    window = min(w for w in loaded.config.layer_windows if w is not None)
    engine = checked_engine(loaded, max_model_len=window, num_blocks=40, block_size=2)
    assert type(engine.kv_manager) is CachedKVCacheManager
    assert loaded.model.groups.windows == (None,)
    serve(engine, oracle, [0], window - len(oracle.prompts[0]))
    engine.close()


def test_slots_that_are_written_are_counted_in_every_group(which: Subject) -> None:
    """Those of the blocks that are held, which are no longer NaN: exactly in decodes."""
    sizes = dict(block_size=4, num_blocks=200, max_num_batched_tokens=16, prefix_cache=None)
    engine = full_of_nan(checked_engine(which.loaded, **sizes))
    engine.add_request("a", max(which.oracle.prompts, key=len), greedy_params(40))
    num_exact = 0
    while engine.has_unfinished_requests():
        engine.step()
        record, tables = engine.recorder.record(), engine.kv_manager.get_tables("a")
        if not engine.has_unfinished_requests():
            break  # and its blocks are free
        ids = [[block_id for block_id in table if block_id] for table in tables]
        of_groups = [engine.kv_cache.key_cache[0][table] for table in ids]
        num_written_slots = sum(int((~keys[..., 0, 0].isnan()).sum()) for keys in of_groups)
        num_tokens = sum(record.num_scheduled_tokens.values())
        starts = list(record.start_positions.values())
        found = engine.kv_manager.num_written_slots(starts, num_tokens)
        is_exact = num_tokens == 1 and starts[0] >= 64
        assert abs(found - num_written_slots) <= (0 if is_exact else len(tables) * 4), starts
        assert record.kv_blocks_in_use == sum(len(keys) for keys in of_groups)
        num_exact += is_exact
    assert num_exact > 5
    engine.close()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"prefix_cache": "radix"}, "prefix_cache='radix'"),
        ({"scheduler": "fcfs"}, "scheduler='fcfs'"),
        ({"kv_tiers": KVTierConfig(host_blocks=2)}, "kv_tiers"),
        ({"speculative": {"method": "draft", "model": "tiny"}}, 'speculative other than "ngram"'),
    ],
)
def test_what_is_not_built_is_refused_by_name(settings, named) -> None:
    loaded = subject("windows").loaded
    with pytest.raises(ValueError, match=re.escape(named)) as error:
        LLMEngine(EngineConfig(num_blocks=40, **settings), loaded=loaded, draft=loaded)
    assert "max_model_len=7" in str(error.value)


# -- layers of two kinds


@pytest.mark.needs("C++ compiler")
@pytest.mark.parametrize("name", ["gemma3", "olmo3"])
@torch.inference_mode()
def test_logits_in_bfloat16_are_as_near_as_those_of_transformers(name) -> None:
    path, prompts = subject(name).oracle.path, [p[:9] for p in subject(name).oracle.prompts[1:5]]
    exact, theirs = (
        torch.cat(reference_logits(path, dtype, prompts)).double()
        for dtype in (torch.float64, torch.bfloat16)
    )
    model = load_model(path, torch.bfloat16).model
    assert model.norm_weight.dtype == torch.float32
    for regions in (Regions(), compile_regions(model)):
        model.regions, harness = regions, PagedHarness(model, 4)
        found = harness.step([(i, 0, prompt) for i, prompt in enumerate(prompts)]).double()
        ours_off, theirs_off = ((x - exact).square().mean().sqrt() for x in (found, theirs))
        assert 0 < ours_off < 1.3 * theirs_off


FIELDS = dict(architectures=["Gemma3ForCausalLM"], model_type="gemma3_text", vocab_size=89)
FIELDS |= dict(hidden_size=32, intermediate_size=40, num_hidden_layers=8, num_attention_heads=4)
OLMO = FIELDS | dict(architectures=["Olmo3ForCausalLM"], model_type="olmo3")


@pytest.mark.parametrize(
    "fields",
    [
        dict(rope_theta=5e4, rope_local_base_freq=300.0, rope_scaling={**LINEAR, "factor": 8.0}),
        dict(rope_parameters={F: LINEAR, W: LOCAL}, rope_theta=7.0, rope_local_base_freq=8.0),
        dict(rope_parameters={W: LINEAR}, sliding_window_pattern=3, sliding_window=7),
        dict(layer_types=[F] * 8, sliding_window_pattern=3),
        OLMO | dict(rope_theta=7e4, sliding_window=7),
        OLMO | dict(rope_parameters={F: LINEAR, W: LOCAL}, num_key_value_heads=2),
        OLMO | dict(layer_types=[F] * 8, sliding_window_pattern=3, rope_local_base_freq=77.0),
    ],
)
def test_both_spellings_of_angles_and_windows_are_read_as_transformers_does(fields) -> None:
    ours = ModelConfig.from_hf({**FIELDS, **fields})
    theirs = AutoConfig.for_model(**json.loads(json.dumps({**FIELDS, **fields})))
    for kind, rope in ((F, ours.rope), (W, ours.window_rope)):
        assert rope is not None
        wanted = theirs.rope_parameters[kind]
        assert (rope.rope_type, rope.theta) == (wanted["rope_type"], wanted["rope_theta"])
        assert rope.factor == wanted.get("factor", 1.0)
    windows = [theirs.sliding_window if k == W else None for k in theirs.layer_types]
    assert list(ours.layer_windows or [None] * 8) == windows
    assert ours.num_key_value_heads == theirs.num_key_value_heads


OF_PICTURES = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping must"),
        ({"final_logit_softcapping": 1.0}, "final_logit_softcapping must"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention must"),
        (OF_PICTURES, "got ['Gemma3ForConditionalGeneration']"),
        ({"hidden_activation": "gelu"}, "hidden_activation must"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must"),
        ({"sliding_window": None}, "sliding_window is None"),
        ({"sliding_window": 0}, "sliding_window must"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern"),
        ({"layer_types": [W, F]}, "layer_types must have 8 entries"),
        ({"rope_parameters": LINEAR}, "rope_parameters must be"),
        ({"rope_parameters": {F: {"rope_type": "dynamic", "factor": 2.0}}}, "rope_type must"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        ModelConfig.from_hf({**FIELDS, **change})
    assert ", got " in str(error.value) or not message.endswith("must")
