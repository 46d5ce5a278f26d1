from __future__ import annotations

import inspect
import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from bounded_loops import as_long_as
from common.models.loader import load_model
from common.models.model_config import FAMILIES, SUPPORTED_ARCHITECTURES, ModelConfig, token_ids
from common.models.rotary import inverse_frequencies, rotary_factors, rotary_table, rotate
from common.tests.model_cases import (
    CASES,
    LINEAR,
    LLAMA3,
    YARN,
    PagedHarness,
    reference_logits,
    save_case,
    tiny_config,
)

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
DTYPES = [torch.float32, torch.float64]
LENGTHS = [1, 4, 7, 16, 33, 48]  # 48: all of the window of mistral-window


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save_case(name, tmp_path_factory.mktemp(name)) for name in CASES}


def random_prompts(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(89) for _ in range(length)] for length in LENGTHS]


def assert_close(actual: torch.Tensor, expected: torch.Tensor, context: str) -> None:
    tolerance = TOLERANCE[actual.dtype]
    assert actual.shape == expected.shape and actual.dtype == expected.dtype, context
    worst = (actual - expected).abs().max().item()
    assert worst <= tolerance, f"{context}: {worst:.2e} > {tolerance:.0e}"  # False for NaN


# -- logits


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_whole_prompts_in_one_step_give_the_logits_of_transformers(name, dtype, checkpoints):
    """Trap 35: every slot that no request owns holds NaN."""
    prompts = random_prompts(seed=1)
    expected = reference_logits(checkpoints[name], dtype, prompts)
    assert 0.5 < torch.cat(expected).std() < 50, "logits too uniform, or too large, to compare"
    harness = PagedHarness(load_model(checkpoints[name], dtype).model, len(prompts))
    logits = harness.step([(i, 0, prompt) for i, prompt in enumerate(prompts)])
    assert_close(logits, torch.cat(expected), f"{name}, seed 1")


@pytest.mark.sample
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_token_by_token_and_in_chunks_equals_the_whole_prompt(name, dtype, checkpoints):
    """Traps 29 and 32: each request has positions of its own, right from its first decode step."""
    seed = 2
    rng, prompts = random.Random(seed), random_prompts(seed)
    expected = reference_logits(checkpoints[name], dtype, prompts)
    model = load_model(checkpoints[name], dtype).model
    for block_size in (1, 4, 33):
        harness = PagedHarness(model, len(prompts), block_size=block_size, seed=seed)
        done = [0] * len(prompts)
        for _ in as_long_as(
            lambda: any(n < len(prompt) for n, prompt in zip(done, prompts, strict=True))
        ):
            unfinished = [i for i, prompt in enumerate(prompts) if done[i] < len(prompt)]
            chosen = rng.sample(unfinished, rng.randint(1, len(unfinished)))
            chunks = [rng.choice((1, 1, 1, 2, 5, 13)) for _ in chosen]
            work = [
                (i, done[i], prompts[i][done[i] : done[i] + n])
                for i, n in zip(chosen, chunks, strict=True)
            ]
            logits = harness.step(work)
            references = [expected[i][first : first + len(tokens)] for i, first, tokens in work]
            context = (
                f"{name}, block size {block_size}, seed {seed}, {[(w[0], w[1]) for w in work]}"
            )
            assert_close(logits, torch.cat(references), context)
            for i, _, tokens in work:
                done[i] += len(tokens)


def test_only_the_rows_asked_for_in_the_order_asked_for(checkpoints):
    prompts = random_prompts(seed=3)[:4]
    expected = torch.cat(reference_logits(checkpoints["qwen3"], torch.float64, prompts))
    model = load_model(checkpoints["qwen3"], torch.float64).model
    work = [(i, 0, prompt) for i, prompt in enumerate(prompts)]
    for indices in ([27, 0, 4], [5], [11, 11, 3], list(range(28)), []):
        logits = PagedHarness(model, len(prompts)).step(work, indices)
        assert logits.shape == (len(indices), 89)
        if indices:
            assert_close(logits, expected[indices], f"{indices}, seed 3")


def test_keys_and_values_are_written_although_no_logits_are_asked_for(checkpoints):
    """A chunk that is not the prompt's last: the last layer skips its rows, but not their KV."""
    prompt = random_prompts(seed=4)[-1]
    expected = reference_logits(checkpoints["llama3-scaling"], torch.float64, [prompt])[0]
    model = load_model(checkpoints["llama3-scaling"], torch.float64).model
    harness = PagedHarness(model, 1)
    assert harness.step([(0, 0, prompt[:20])], []).shape == (0, 89)
    assert_close(harness.step([(0, 20, prompt[20:])]), expected[20:], "seed 4")


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_cuda_gives_the_logits_of_transformers_on_the_cpu(name, checkpoints):
    prompts = random_prompts(seed=5)
    expected = torch.cat(reference_logits(checkpoints[name], torch.float64, prompts))
    model = load_model(checkpoints[name], torch.float64, "cuda").model
    harness = PagedHarness(model, len(prompts))
    logits = harness.step([(i, 0, prompt) for i, prompt in enumerate(prompts)]).cpu()
    # A float32 island may round the other way on another device: 1e-6 and not 1e-9.
    assert (logits - expected).abs().max() < 1e-6, "seed 5"


# -- the pieces


@pytest.mark.parametrize("name", ["qwen3", "qwen2-untied", "llama3-scaling"])
def test_rotary_embedding_is_that_of_transformers_far_out_too(name, checkpoints):
    hf = AutoConfig.from_pretrained(checkpoints[name])
    config = ModelConfig.from_hf(json.loads((checkpoints[name] / "config.json").read_text()))
    their_rotary = LlamaRotaryEmbedding(hf)
    assert torch.equal(inverse_frequencies(config.rope, config.head_dim), their_rotary.inv_freq)

    torch.manual_seed(7)
    positions = torch.tensor([0, 1, 2, 40_959, 131_071])
    x = torch.randn(5, 3, config.head_dim, dtype=torch.float64)
    cos, sin = their_rotary(x, positions[None])
    theirs, _ = apply_rotary_pos_emb(x[None], x[None], cos, sin, unsqueeze_dim=2)
    table = rotary_table(config.rope, config.head_dim, 131_072, torch.float64)
    ours = rotate(x, rotary_factors(table, positions))
    torch.testing.assert_close(ours, theirs[0], rtol=0, atol=1e-12)


YARNS = {
    "defaults": {},
    "Qwen3's": dict(rope_theta=1e6, original_max_position_embeddings=32_768),
    "bands": dict(beta_fast=5.0, beta_slow=0.5, rope_theta=90.0),
    "one pair": dict(beta_fast=9.0, beta_slow=4.0),
    "no range": dict(rope_theta=1e4, beta_fast=1e4, beta_slow=1e3),
    "small base": dict(rope_theta=10.0, beta_fast=300.0, original_max_position_embeddings=2_000),
    "no power of two": dict(factor=2.7),
    "given": dict(attention_factor=0.7),
    "mscale": dict(mscale=0.7, mscale_all_dim=1.3),
    "half of mscale": dict(mscale=0.7),
    "shorter": dict(factor=0.5),
}


@pytest.mark.parametrize("name", YARNS)
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_yarn_has_the_angles_and_the_factor_of_transformers(name: str, head_dim: int) -> None:
    rope = YARN | YARNS[name]
    sizes = dict(head_dim=head_dim, num_key_value_heads=2)
    theirs = tiny_config(Qwen3Config, **sizes, rope_parameters=dict(rope))
    inv_freq, factor = ROPE_INIT_FUNCTIONS["yarn"](theirs)
    ours = ModelConfig.from_hf(theirs.to_dict()).rope
    assert torch.equal(inverse_frequencies(ours, head_dim), inv_freq)
    assert ours.attention_factor == factor
    assert (
        ModelConfig.from_hf(theirs.to_dict() | {"original_max_position_embeddings": None}).rope
        == ours
    )
    cos = rotary_table(ours, head_dim, 50, torch.float64)[49, : head_dim // 2]
    assert torch.equal(cos, ((49 * inv_freq).cos() * factor).double())


# -- configurations: accepted


def read_config(path: Path) -> dict:
    return json.loads((path / "config.json").read_text())


def write_config(path: Path, fields: dict) -> None:
    (path / "config.json").write_text(json.dumps(fields))


@pytest.mark.parametrize("name", ["qwen3", "qwen2-untied", "llama3-scaling", "qwen3-yarn"])
@pytest.mark.parametrize("type_key", ["rope_type", "type"])
def test_old_spelling_of_rotary_parameters(name, type_key, tmp_path):
    save_case(name, tmp_path)
    fields = read_config(tmp_path)
    rope = fields.pop("rope_parameters")
    fields["rope_theta"] = rope.pop("rope_theta")
    rope[type_key] = rope.pop("rope_type")
    fields["rope_scaling"] = None if rope == {type_key: "default"} else rope
    fields["torch_dtype"] = fields.pop("dtype")
    new_config = load_model(tmp_path, torch.float64).config
    write_config(tmp_path, fields)
    assert load_model(tmp_path, torch.float64).config == new_config
    prompts = random_prompts(seed=8)[-1:]
    expected = reference_logits(tmp_path, torch.float64, prompts)[0]
    harness = PagedHarness(load_model(tmp_path, torch.float64).model, 1)
    assert_close(harness.step([(0, 0, prompts[0])]), expected, f"{name}, seed 8")


def test_rope_theta_inside_the_new_spelling_wins_and_10000_is_the_default(checkpoints):
    fields = read_config(checkpoints["qwen3"])
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": 77.0}
    assert ModelConfig.from_hf({**fields, "rope_theta": 5.0}).rope.theta == 77.0
    del fields["rope_parameters"]
    assert ModelConfig.from_hf({**fields, "rope_theta": 5.0}).rope.theta == 5.0
    assert ModelConfig.from_hf(fields).rope.theta == 10_000.0


SIZES = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "rms_norm_eps"]
SIZES += ["num_attention_heads", "num_key_value_heads", "max_position_embeddings"]


@pytest.mark.parametrize("architecture", SUPPORTED_ARCHITECTURES)
def test_absent_fields_mean_what_they_mean_to_transformers(architecture: str) -> None:
    """Trap 81. A file may hold nothing but what it is a file of."""
    fields: dict = {
        "architectures": [architecture],
        "model_type": FAMILIES[architecture].model_type,
    }
    ours, theirs = ModelConfig.from_hf(fields), AutoConfig.for_model(fields["model_type"])
    for name in (*SIZES, "tie_word_embeddings"):
        assert getattr(ours, name) == getattr(theirs, name), name
    quotient = theirs.hidden_size // theirs.num_attention_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or quotient)
    assert ours.eos_token_ids == token_ids("eos", theirs.eos_token_id)
    assert ours.layer_windows == windows_of(theirs)
    ropes = theirs.rope_parameters
    assert ours.rope.theta == ropes.get("full_attention", ropes)["rope_theta"]
    if ours.window_rope is not None:
        assert ours.window_rope.theta == ropes["sliding_attention"]["rope_theta"]
    scalar = getattr(theirs, "query_pre_attn_scalar", None)
    assert scalar is None or ours.query_pre_attn_scalar == scalar
    assert ours.activation == getattr(theirs, "hidden_activation", "silu")
    if ours.experts is not None:
        e = ours.experts
        size = theirs.to_dict().get("moe_intermediate_size", theirs.intermediate_size)
        given = e.num_experts, e.num_active, e.intermediate_size
        assert given == (theirs.num_experts, theirs.num_experts_per_tok, size)
    if hasattr(theirs, "use_sliding_window"):
        switched = ModelConfig.from_hf(fields | {"use_sliding_window": True})
        theirs = AutoConfig.for_model(fields["model_type"], use_sliding_window=True)
        assert switched.layer_windows == windows_of(theirs) and any(switched.layer_windows)


def windows_of(theirs: Any) -> tuple:
    """The window of each layer. Without `layer_types` all layers have the same one."""
    window = getattr(theirs, "sliding_window", None)
    kinds = getattr(theirs, "layer_types", None)
    kinds = kinds or ["sliding_attention"] * theirs.num_hidden_layers
    windows = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return windows if any(windows) else ()


@pytest.mark.parametrize("architecture", SUPPORTED_ARCHITECTURES)
def test_a_field_that_no_architecture_reads_changes_nothing(architecture: str, caplog) -> None:
    """Trap 81. Qwen3-Coder says `use_qk_norm`; its layers norm queries and keys anyway."""
    family = FAMILIES[architecture]
    fields = {"architectures": [architecture], "model_type": family.model_type}
    theirs = AutoConfig.for_model(family.model_type)
    source = Path(inspect.getfile(type(theirs)))
    for path in (source, source.with_name(source.name.replace("configuration", "modeling"))):
        assert "use_qk_norm" not in path.read_text(encoding="utf-8"), "it is read now"
    with caplog.at_level(logging.WARNING):
        config = ModelConfig.from_hf(fields | {"use_qk_norm": True})
    assert config == ModelConfig.from_hf(fields)
    assert ("use_qk_norm" in caplog.text) == (not family.has_qk_norm)  # said where none is normed


def test_mistral_has_a_window_in_every_layer(checkpoints):
    fields = read_config(checkpoints["mistral-window"])
    config = ModelConfig.from_hf(fields)
    assert config.layer_windows == (48, 48, 48)
    assert (config.max_position_embeddings, config.num_unhidden) == (64, 48)
    assert ModelConfig.from_hf({**fields, "sliding_window": None}).layer_windows == ()
    del fields["sliding_window"]
    assert ModelConfig.from_hf(fields).layer_windows == (4096,) * 3  # as transformers has it
    assert ModelConfig.from_hf(fields).num_unhidden == 64


@pytest.mark.parametrize(("window", "is_said"), [(65, True), (64, False)])
def test_a_window_larger_than_the_model_is_said_once(
    window: int, is_said: bool, tmp_path: Path, caplog
) -> None:
    save_case("mistral-window", tmp_path, sliding_window=window)
    with caplog.at_level(logging.WARNING):
        model = load_model(tmp_path, torch.float64).model
    message = "sliding_window is 65 and max_position_embeddings 64: it hides nothing"
    assert [message in record.getMessage() for record in caplog.records] == [True] * is_said
    assert not model.groups.have_windows
    model.group_layers(64)
    assert not model.groups.have_windows


def test_qwen_has_a_window_only_where_it_is_switched_on(checkpoints):
    fields = read_config(checkpoints["qwen2"])
    del fields["layer_types"]

    def windows(**changes: Any) -> tuple:
        fields.update(changes)
        return ModelConfig.from_hf(fields).layer_windows

    assert windows(sliding_window=16, max_window_layers=2, use_sliding_window=False) == ()
    assert windows(use_sliding_window=True) == (None, None, 16)
    assert windows(max_window_layers=3) == ()  # the first three layers of three have none
    assert windows(max_window_layers=0) == (16, 16, 16)
    assert windows(max_window_layers=-1, use_sliding_window=False) == ()  # not asked
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    switched_on = {"max_window_layers": 3, "use_sliding_window": True}
    assert windows(**switched_on, layer_types=kinds) == (None, 16, None)
    theirs = AutoConfig.for_model(**fields)
    assert (theirs.layer_types, theirs.sliding_window) == (kinds, 16)


def test_unknown_fields_are_named_in_the_log(checkpoints, caplog):
    with caplog.at_level(logging.WARNING):
        for name, path in checkpoints.items():
            more = {"cache_implementation": "hybrid"} if name == "gemma3" else {}
            ModelConfig.from_hf(fields := {**read_config(path), "_private": 1, **more})
        assert not caplog.records, "a configuration as transformers writes it has unknown fields"
        ModelConfig.from_hf({**fields, "favourite_colour": "green"})
    assert "favourite_colour" in caplog.text


# -- configurations: refused

REFUSED = {
    "architectures-other": ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
    "architectures-headless": ({"architectures": ["Qwen3Model"]}, "Qwen3Model"),
    "architectures-empty": ({"architectures": None, "model_type": "gpt2"}, "gpt2"),
    "model_type": ({"model_type": "llama"}, "llama"),
    "hidden_act": ({"hidden_act": "gelu"}, "gelu"),
    "quantization": ({"quantization_config": {"bits": 4}}, "quantization_config"),
    "moe": ({"num_experts": 8}, "num_experts"),
    "softcap": ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    "true is not 1": ({"use_mrope": True}, "use_mrope must"),
    "own code": (
        {"auto_map": {"AutoConfig": "configuration_x.XConfig"}},
        "auto_map must",
    ),
    "vision": ({"vision_config": {"depth": 2}}, "vision_config"),
    "partial rotary": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must"),
    "partial rotary inside": (
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
        "partial_rotary_factor must",
    ),
    "longrope": ({"rope_parameters": {"rope_type": "longrope", "factor": 4.0}}, "'longrope'"),
    "yarn without factor": ({"rope_parameters": {"rope_type": "yarn"}}, "factor must"),
    "yarn reversed": (
        {"rope_parameters": {**YARN, "beta_fast": 0.5}},
        "beta_fast must exceed beta_slow",
    ),
    "yarn reversed by what is absent": (
        {"rope_parameters": {**YARN, "beta_slow": 33}},
        "beta_fast must exceed beta_slow",
    ),
    "yarn with a base of 1": ({"rope_parameters": {**YARN, "rope_theta": 1}}, "rope_theta must"),
    "rope_type is a list": ({"rope_parameters": {"rope_type": ["yarn"]}}, "rope_type must"),
    "yarn, truncate": ({"rope_parameters": {**YARN, "truncate": False}}, "truncate must"),
    "dynamic, old": ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "'dynamic'"),
    "mrope": ({"rope_scaling": {"type": "default", "mrope_section": [1, 2]}}, "mrope_section"),
    "nested rope": ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "full_attention"),
    "rope not an object": ({"rope_parameters": 7}, "rope_parameters must"),
    "linear without factor": ({"rope_parameters": {"rope_type": "linear"}}, "factor must"),
    "llama3 incomplete": (
        {"rope_parameters": {**LLAMA3, "low_freq_factor": None}},
        "low_freq_factor must",
    ),
    "llama3 reversed": ({"rope_parameters": {**LLAMA3, "high_freq_factor": 0.5}}, "high_freq"),
    "negative factor": ({"rope_parameters": {**LINEAR, "factor": -1.0}}, "factor must"),
    "layer_types": ({"layer_types": ["linear_attention"] * 3}, "linear_attention"),
    "layer_types in a list": ({"layer_types": [["full_attention"]] * 3}, "[['full_attention']]"),
    "layer_types is a number": ({"layer_types": 3}, "layer_types must"),
    "window type without window": ({"layer_types": ["sliding_attention"] * 3}, "sliding_attention"),
    "kv heads": ({"num_key_value_heads": 3}, "num_key_value_heads must"),
    "odd head_dim": ({"head_dim": 15}, "head_dim must"),
    "missing": ({"hidden_size": None}, "hidden_size must"),
    "text": ({"vocab_size": "89"}, "vocab_size must"),
    "boolean": ({"num_hidden_layers": True}, "num_hidden_layers must"),
    "zero": ({"intermediate_size": 0}, "intermediate_size must"),
    "eps": ({"rms_norm_eps": -1e-6}, "rms_norm_eps"),
    "eos": ({"eos_token_id": "</s>"}, "eos_token_id"),
    "mlp bias": ({"mlp_bias": True}, "mlp_bias must"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_refused_by_name(case, checkpoints):
    change, message = REFUSED[case]
    fields = read_config(checkpoints["qwen3"])
    ModelConfig.from_hf(fields)
    with pytest.raises(ValueError) as error:
        ModelConfig.from_hf({**fields, **change})
    assert message in str(error.value)
    assert ", got " in str(error.value) or not message.endswith("must")
    if case.startswith("architectures"):
        assert all(name in str(error.value) for name in SUPPORTED_ARCHITECTURES)


def test_biases_and_windows_that_a_family_does_not_have_are_refused(checkpoints):
    mistral, llama = read_config(checkpoints["mistral"]), read_config(checkpoints["llama-biases"])
    with pytest.raises(ValueError, match="attention_bias must be false in mistral, got True"):
        ModelConfig.from_hf({**mistral, "attention_bias": True})
    with pytest.raises(ValueError, match="sliding_window must be null in llama, got 16"):
        ModelConfig.from_hf({**llama, "sliding_window": 16})
