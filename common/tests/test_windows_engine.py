"""Layers that attend to a window, and of two kinds, beyond the array: what a configuration or a
checkpoint may not say."""

from __future__ import annotations

import json
import re

import pytest
import torch
from transformers import AutoConfig

from common.engine import LLMEngine
from common.engine_config import EngineConfig
from common.models.model_config import ModelConfig
from common.models.rotary import inverse_frequencies
from common.tests.model_cases import LINEAR, LOCAL, F, W
from common.tests.small_models import subject
from tiered_cache import KVTierConfig

pytestmark = pytest.mark.usefixtures("one_thread")


def test_what_is_not_built_is_refused_by_name() -> None:
    loaded = subject("windows").loaded
    for settings, named in (
        ({"prefix_cache": "radix"}, "prefix_cache='radix'"),
        ({"scheduler": "fcfs"}, "scheduler='fcfs'"),
        ({"kv_tiers": KVTierConfig(host_blocks=2)}, "kv_tiers"),
        ({"speculative": {"method": "draft", "model": "tiny"}}, 'speculative other than "ngram"'),
    ):
        with pytest.raises(ValueError, match=re.escape(named)) as error:
            LLMEngine(EngineConfig(num_blocks=40, **settings), loaded=loaded, draft=loaded)
        assert "max_model_len=7" in str(error.value)


FIELDS = dict(architectures=["Gemma3ForCausalLM"], model_type="gemma3_text", vocab_size=89)
FIELDS |= dict(hidden_size=32, intermediate_size=40, num_hidden_layers=8, num_attention_heads=4)
OLMO = FIELDS | dict(architectures=["Olmo3ForCausalLM"], model_type="olmo3")


@pytest.mark.parametrize(
    "fields",
    [
        dict(rope_theta=5e4, rope_local_base_freq=300.0, rope_scaling={**LINEAR, "factor": 8.0}),
        dict(rope_parameters={F: LINEAR, W: LOCAL}, rope_theta=7.0, rope_local_base_freq=8.0),
        dict(rope_parameters={W: LINEAR}, sliding_window_pattern=3, sliding_window=7),
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
        usual = 1.0 / rope.theta ** (torch.arange(0, ours.head_dim, 2).float() / ours.head_dim)
        found = inverse_frequencies(rope, ours.head_dim)
        assert torch.equal(found, usual / wanted.get("factor", 1.0))
    windows = [theirs.sliding_window if k == W else None for k in theirs.layer_types]
    assert list(ours.layer_windows or [None] * 8) == windows
    assert ours.num_key_value_heads == theirs.num_key_value_heads


OF_PICTURES = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention must"),
        (OF_PICTURES, "got ['Gemma3ForConditionalGeneration']"),
        ({"hidden_activation": "gelu"}, "hidden_activation must"),
        ({"rope_parameters": LINEAR}, "rope_parameters: factor must be"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        ModelConfig.from_hf({**FIELDS, **change})
