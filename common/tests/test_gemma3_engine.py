"""An engine over Gemma 3 or OLMo 3, whose layers are of two kinds, and what a configuration or a
checkpoint may not say. Prompts far longer than the window are rows of `claims.py`; logits of whole
prompts are compared in `common/models/test_model.py`."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig

from common.models.loader import load_model
from common.models.model_config import ModelConfig
from common.models.ranks import Ranks
from common.models.regions.compiled_regions import compile_regions
from common.models.regions.regions import Regions
from common.parallel.sharded_model import rank_config
from common.tests.adapter_cases import KINDS, by_peft, save_adapter
from common.tests.engine_oracle import (
    Oracle,
    checked_engine,
    greedy_params,
    make_oracle,
    random_prompts,
)
from common.tests.model_cases import (
    LINEAR,
    LOCAL,
    YARN,
    F,
    PagedHarness,
    W,
    reference_logits,
    save_case,
)
from request import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")
# -- up to the window nothing is refused


@pytest.fixture(scope="module", params=["gemma3", "olmo3"])
def short(request, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    path = save_case(request.param, tmp_path_factory.mktemp("short"), 5)
    return make_oracle(path, random_prompts(4, vocab_size=89, longest=20, seed=3))


def test_adapters_are_those_of_peft(short, tmp_path) -> None:
    """What an adapter adds to `o` and `down` is normed with what they give."""
    adapter = save_adapter(short.path, tmp_path / "own", **KINDS["everything"])
    loaded = load_model(short.path, torch.float64)
    engine = checked_engine(loaded, num_blocks=80, adapters={"own": adapter})
    found = engine.generate_batch(short.prompts, greedy_params(6), adapter="own")
    expected = by_peft(short.path, adapter, short.prompts, 6)
    assert [o.outputs[0].token_ids for o in found.values()] == expected
    assert expected != [short.expected(i, 6) for i in range(4)]


def test_packed_and_batch_invariant(short) -> None:
    loaded = load_model(short.path, torch.float32)
    config = dict(num_blocks=80, batch_invariant=True, max_model_len=48)
    engine = checked_engine(loaded, **config)
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=2, ignore_eos=True)

    def seen(prompts: list[list[int]]) -> list[list]:
        outputs = engine.generate_batch(prompts, params).values()
        return [[(e.token_id, e.logprob) for e in o.outputs[0].logprobs] for o in outputs]

    together = seen(short.prompts)
    assert together == [seen([prompt])[0] for prompt in short.prompts]
    assert [[t for t, _ in row] for row in together] == [short.expected(i, 6) for i in range(4)]


@pytest.mark.needs("C++ compiler")
@torch.inference_mode()
def test_logits_in_bfloat16_are_as_near_as_those_of_transformers(short) -> None:
    exact, theirs = (
        torch.cat(reference_logits(short.path, dtype, short.prompts)).double()
        for dtype in (torch.float64, torch.bfloat16)
    )
    model = load_model(short.path, torch.bfloat16).model
    assert model.norm_weight.dtype == torch.float32
    for regions in (Regions(), compile_regions(model)):
        model.regions, harness = regions, PagedHarness(model, 4)
        found = harness.step([(i, 0, prompt) for i, prompt in enumerate(short.prompts)]).double()
        ours_off, theirs_off = ((x - exact).square().mean().sqrt() for x in (found, theirs))
        assert 0 < ours_off < 1.3 * theirs_off


# -- checkpoints


def test_olmo3_on_several_ranks_is_refused_by_name(tmp_path) -> None:
    config = load_model(save_case("olmo3", tmp_path), torch.float64).config
    with pytest.raises(ValueError, match=r"tensor_parallel_size must be 1 for Olmo3.*, got 2"):
        rank_config(config, Ranks(2))


# -- configurations

OLMO = dict(architectures=["Olmo3ForCausalLM"], model_type="olmo3", vocab_size=89)
OLMO |= dict(hidden_size=32, intermediate_size=40, num_hidden_layers=8, num_attention_heads=4)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        dict(rope_theta=7e4, rope_scaling={**YARN, "factor": 8.0}, sliding_window=7),
        dict(rope_parameters={F: LINEAR, W: LOCAL}, num_key_value_heads=2),
        dict(layer_types=[F] * 8, sliding_window_pattern=3, rope_local_base_freq=77.0),
        dict(rope_scaling=YARN, original_max_position_embeddings=100),
    ],
)
def test_olmo3_is_read_as_transformers_does(fields) -> None:
    ours, theirs = ModelConfig.from_hf(OLMO | fields), AutoConfig.for_model(**OLMO | fields)
    kinds = [theirs.sliding_window if kind == W else None for kind in theirs.layer_types]
    assert ours.layer_windows == (tuple(kinds) if any(kinds) else ())
    for rope, name in ((ours.rope, F), (ours.window_rope, W)):
        assert rope is not None
        wanted = theirs.rope_parameters[name]
        assert (rope.rope_type, rope.theta) == (wanted["rope_type"], wanted["rope_theta"])
        assert rope.factor == wanted.get("factor", 1.0)
        if rope.rope_type == "yarn":
            original = wanted["original_max_position_embeddings"]
            assert rope.original_max_position_embeddings == original
    for name in ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.eos_token_ids == (theirs.eos_token_id,)


FIELDS = dict(architectures=["Gemma3ForCausalLM"], model_type="gemma3_text", vocab_size=89)
FIELDS |= dict(hidden_size=32, intermediate_size=40, num_hidden_layers=8, num_attention_heads=4)


@pytest.mark.parametrize(
    "fields",
    [
        dict(rope_theta=5e4, rope_local_base_freq=300.0, rope_scaling={**LINEAR, "factor": 8.0}),
        dict(rope_parameters={F: LINEAR, W: LOCAL}, rope_theta=7.0, rope_local_base_freq=8.0),
        dict(rope_parameters={W: LINEAR}, sliding_window_pattern=3, sliding_window=7),
        dict(layer_types=[F] * 8, sliding_window_pattern=3),
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
    assert [ours.rotary_of(i) for i in range(8)] == [int(k == W) for k in theirs.layer_types]


REFUSED = {
    "scores are capped": ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping must"),
    "logits are capped": ({"final_logit_softcapping": 1.0}, "final_logit_softcapping must"),
    "both ways": ({"use_bidirectional_attention": True}, "use_bidirectional_attention must"),
    "pictures": (
        {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"},
        "got ['Gemma3ForConditionalGeneration']",
    ),
    "activation": ({"hidden_activation": "gelu"}, "hidden_activation must"),
    "scalar": ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must"),
    "no window": ({"sliding_window": None}, "sliding_window is None"),
    "window of 0": ({"sliding_window": 0}, "sliding_window must"),
    "pattern of 0": ({"sliding_window_pattern": 0}, "sliding_window_pattern"),
    "kinds too few": ({"layer_types": [W, F]}, "layer_types must have 8 entries"),
    "one rope for all": ({"rope_parameters": LINEAR}, "rope_parameters must be"),
    "unknown rope": (
        {"rope_parameters": {F: {"rope_type": "dynamic", "factor": 2.0}}},
        "rope_type must",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_refused_by_name(case: str) -> None:
    change, message = REFUSED[case]
    with pytest.raises(ValueError) as error:
        ModelConfig.from_hf({**FIELDS, **change})
    assert message in str(error.value)
    assert ", got " in str(error.value) or not message.endswith("must")
