from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from bounded_loops import as_long_as
from common.models.families import FAMILIES, SUPPORTED_ARCHITECTURES
from common.models.loader import load_model
from common.models.model_config import ModelConfig, token_ids
from common.models.rotary import inverse_frequencies, rotary_table
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
    assert ((actual - expected).abs() <= tolerance).all(), context  # False for NaN


# -- logits


@pytest.mark.net
@pytest.mark.sample
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [1, 4, 33])
@pytest.mark.parametrize("name", CASES)
def test_whole_prompts_in_one_step_give_the_logits_of_transformers(
    name, block_size, dtype, checkpoints
):
    """And so do chunks of any length. Traps 29, 32 and 35: each request has positions of its own,
    right from its first decode step, and every slot that no request owns holds NaN."""
    rng = random.Random(2)
    prompts = random_prompts(seed=2)
    expected = reference_logits(checkpoints[name], dtype, prompts)
    assert 0.5 < torch.cat(expected).std() < 50, "logits too uniform, or too large, to compare"
    model = load_model(checkpoints[name], dtype).model
    harness = PagedHarness(model, len(prompts), block_size=block_size, seed=1)
    logits = harness.step([(i, 0, prompt) for i, prompt in enumerate(prompts)])
    assert_close(logits, torch.cat(expected), f"{name}, whole")
    harness = PagedHarness(model, len(prompts), block_size=block_size, seed=2)
    done = [0] * len(prompts)
    unfinished = range(len(prompts))
    for _ in as_long_as(lambda: unfinished):
        work = []
        for i in rng.sample(unfinished, rng.randint(1, len(unfinished))):
            num_tokens = rng.choice((1, 1, 1, 2, 5, 13))
            work.append((i, done[i], prompts[i][done[i] : done[i] + num_tokens]))
            done[i] += num_tokens
        logits = harness.step(work)
        references = [expected[i][first : first + len(tokens)] for i, first, tokens in work]
        assert_close(logits, torch.cat(references), f"{name}, {[(w[0], w[1]) for w in work]}")
        unfinished = [i for i, prompt in enumerate(prompts) if done[i] < len(prompt)]


def test_only_the_rows_asked_for_in_the_order_asked_for(checkpoints):
    """Keys and values of the others are written all the same, in the last layer too."""
    prompts = random_prompts(seed=3)[:4]
    expected = torch.cat(reference_logits(checkpoints["llama3-scaling"], torch.float64, prompts))
    model = load_model(checkpoints["llama3-scaling"], torch.float64).model
    work = [(i, 0, prompt) for i, prompt in enumerate(prompts)]
    for indices in ([27, 0, 4], [5], [11, 11, 3], list(range(28)), []):
        logits = PagedHarness(model, len(prompts)).step(work, indices)
        assert_close(logits, expected[indices], f"{indices}")
    harness = PagedHarness(model, 1)
    assert harness.step([(0, 0, prompts[3][:9])], []).shape == (0, 89)
    assert_close(harness.step([(0, 9, prompts[3][9:])]), expected[-7:], "seed 3")


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


@pytest.mark.parametrize("kind", [LINEAR, LLAMA3, YARN], ids=lambda rope: rope["rope_type"])
@pytest.mark.parametrize("head_dim", [16, 128])
def test_scaled_angles_and_their_factor_are_those_of_transformers(kind, head_dim: int) -> None:
    sizes = dict(head_dim=head_dim, num_key_value_heads=2)
    theirs = tiny_config(Qwen3Config, **sizes, rope_parameters=dict(kind))
    inv_freq, factor = ROPE_INIT_FUNCTIONS[kind["rope_type"]](theirs)
    ours = ModelConfig.from_hf(theirs.to_dict() | {"architectures": ["Qwen3ForCausalLM"]}).rope
    assert torch.equal(inverse_frequencies(ours, head_dim), inv_freq)
    cos = rotary_table(ours, head_dim, 40_960, torch.float64)[-1, : head_dim // 2]
    assert torch.equal(cos, ((40_959 * inv_freq).cos() * factor).double())


# -- configurations: accepted


def read_config(path: Path) -> dict:
    return json.loads((path / "config.json").read_text())


@pytest.mark.parametrize("name", ["qwen3", "qwen2-untied", "llama3-scaling", "qwen3-yarn"])
def test_old_spelling_of_rotary_parameters(name, checkpoints):
    """The new one wins, and 10,000 is the default."""
    fields = read_config(checkpoints[name])
    new_config = ModelConfig.from_hf(dict(fields))
    rope = fields.pop("rope_parameters")
    assert ModelConfig.from_hf(fields).rope.theta == 10_000.0
    fields["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    fields["torch_dtype"] = fields.pop("dtype")
    for type_key in ("rope_type", "type"):
        old = {} if kind == "default" else {"rope_scaling": rope | {type_key: kind}}
        assert ModelConfig.from_hf(fields | old) == new_config
    both = fields | {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}
    assert ModelConfig.from_hf(both).rope.theta == 77.0


SIZES = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "rms_norm_eps"]
SIZES += ["num_attention_heads", "num_key_value_heads", "max_position_embeddings"]


@pytest.mark.parametrize("architecture", SUPPORTED_ARCHITECTURES)
def test_absent_fields_mean_what_they_mean_to_transformers(architecture: str, caplog) -> None:
    """Trap 81. A file may hold nothing but what it is a file of. And a field that no architecture
    reads changes nothing: Qwen3-Coder says `use_qk_norm`; its layers norm anyway."""
    fields: dict = {
        "architectures": [architecture],
        "model_type": FAMILIES[architecture].model_type,
    }
    ours = ModelConfig.from_hf(fields)
    theirs = AutoConfig.for_model(fields["model_type"])
    assert ModelConfig.from_hf(fields | {"use_qk_norm": True}) == ours
    said = "use_qk_norm" in caplog.text  # where none is normed
    assert said == (not FAMILIES[architecture].has_qk_norm)
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
    if (e := ours.experts) is not None:
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


KINDS = ["full_attention", "sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mistral-window", {"sliding_window": None}),
        # Qwen has a window only where it is switched on, in layers after the first ones.
        *(
            ("qwen2", {"sliding_window": 16, "use_sliding_window": is_on, "max_window_layers": n})
            for is_on, n in ((True, 2), (True, 3), (False, 0))
        ),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": True, "layer_types": KINDS}),
    ],
)
def test_windows_are_those_of_transformers(name, changes, checkpoints):
    fields = read_config(checkpoints[name]) | {"layer_types": None} | changes
    theirs = windows_of(AutoConfig.for_model(**fields))
    assert ModelConfig.from_hf(fields).layer_windows == theirs


def test_a_window_that_is_absent_has_a_default_and_one_that_is_larger_hides_nothing(tmp_path):
    fields = read_config(save_case("mistral-window", tmp_path, sliding_window=65))
    model = load_model(tmp_path, torch.float64).model
    assert not model.groups.have_windows
    model.group_layers(64)
    assert not model.groups.have_windows
    assert ModelConfig.from_hf(fields | {"sliding_window": 48}).num_unhidden == 48
    del fields["sliding_window"]
    config = ModelConfig.from_hf(fields)
    assert (config.layer_windows, config.num_unhidden) == ((4096,) * 3, 64)  # as transformers has


def test_unknown_fields_are_named_in_the_log(checkpoints, caplog):
    with caplog.at_level(logging.WARNING):
        for name, path in checkpoints.items():
            more = {"cache_implementation": "hybrid"} if name == "gemma3" else {}
            ModelConfig.from_hf(fields := {**read_config(path), "_private": 1, **more})
        assert "unknown fields" not in caplog.text, "in a configuration as transformers writes it"
        ModelConfig.from_hf({**fields, "favourite_colour": "green"})
    assert "favourite_colour" in caplog.text


# -- configurations: refused

REFUSED = {
    "architectures-other": ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
    "architectures-empty": ({"architectures": None, "model_type": "gpt2"}, "gpt2"),
    "model_type": ({"model_type": "llama"}, "llama"),
    "hidden_act": ({"hidden_act": "gelu"}, "gelu"),
    "moe": ({"num_experts": 8}, "num_experts"),
    "softcap": ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    "true is not 1": ({"use_mrope": True}, "use_mrope must"),
    "own code": ({"auto_map": {"AutoConfig": "x.XConfig"}}, "auto_map must"),
    "partial rotary inside": (
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
        "partial_rotary_factor must",
    ),
    "longrope": ({"rope_parameters": {"rope_type": "longrope", "factor": 4.0}}, "'longrope'"),
    "dynamic, old": ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "'dynamic'"),
    "mrope": ({"rope_scaling": {"type": "default", "mrope_section": [1, 2]}}, "mrope_section"),
    "nested rope": ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "full_attention"),
    "linear without factor": ({"rope_parameters": {"rope_type": "linear"}}, "factor"),
    "layer_types": ({"layer_types": ["linear_attention"] * 3}, "linear_attention"),
    "window type without window": ({"layer_types": ["sliding_attention"] * 3}, "sliding_attention"),
    "window of 0": (
        {"use_sliding_window": True, "sliding_window": 0, "layer_types": KINDS},
        "sliding_window must",
    ),
    "layer_types of two": ({"layer_types": ["full_attention"] * 2}, "`layer_types` (2)"),
    "kv heads": ({"num_key_value_heads": 3}, "num_key_value_heads must"),
    "odd head_dim": ({"head_dim": 15}, "head_dim"),
    "missing": ({"hidden_size": None}, "hidden_size"),
    "boolean": ({"num_hidden_layers": True}, "num_hidden_layers"),
    "zero": ({"intermediate_size": 0}, "intermediate_size must"),
    "eos": ({"eos_token_id": "</s>"}, "eos_token_id"),
    "mlp bias": ({"mlp_bias": True}, "mlp_bias must"),
    "bias of mistral": ({"attention_bias": True}, "attention_bias must be absent in mistral"),
    "window of llama": ({"sliding_window": 16}, "sliding_window must be absent in llama"),
    "a shared one of moe": (
        {"shared_expert_intermediate_size": 64},
        "shared_expert_intermediate_size must",
    ),
    "groups of moe": ({"n_group": 4}, "n_group must"),
    "scores of moe": ({"scoring_func": "sigmoid"}, "scoring_func must"),
    "scale of moe": ({"routed_scaling_factor": 2.5}, "routed_scaling_factor must"),
    "none of moe": ({"num_experts": 0, "num_local_experts": 0}, "num_experts must"),
    "no size of moe": ({"moe_intermediate_size": None}, "moe_intermediate_size"),
    "too many of moe": ({"num_experts_per_tok": 6}, "num_experts_per_tok must"),
    "step of moe": ({"decoder_sparse_step": 0}, "decoder_sparse_step must"),
    "jitter of moe": ({"router_jitter_noise": 0.1}, "router_jitter_noise must"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_refused_by_name(case, checkpoints):
    change, message = REFUSED[case]
    kind = case.partition(" of ")[2]
    bases = {"llama": "llama-biases", "mistral": "mistral", "moe": "qwen3-moe"}
    base = bases.get(kind, "qwen3")
    fields = read_config(checkpoints[base])
    ModelConfig.from_hf(fields)
    with pytest.raises(ValueError) as error:
        ModelConfig.from_hf({**fields, **change})
    assert message in str(error.value)
    assert ", got " in str(error.value) or not message.endswith("must")
    if case.startswith("architectures"):
        assert all(name in str(error.value) for name in SUPPORTED_ARCHITECTURES)
