"""Tiny random checkpoints of all families, saved by `transformers`, and its logits."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from common.tests.paged_harness import PagedHarness as PagedHarness

SIZES = dict(vocab_size=89, hidden_size=32, intermediate_size=40, num_hidden_layers=3)
LIMITS = dict(num_attention_heads=4, max_position_embeddings=64)
NO_TOKENS = dict.fromkeys(["bos_token_id", "eos_token_id", "pad_token_id"])
SHAPE = {**SIZES, **LIMITS, **NO_TOKENS}
# Chosen so that some wavelengths are short, some are blended and some are long.
BANDS = dict(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
LLAMA3 = dict(rope_type="llama3", rope_theta=10_000.0, factor=8.0, **BANDS)
LINEAR = dict(rope_type="linear", rope_theta=500.0, factor=2.5)
# Of eight pairs of channels the first stays, the last is divided, and between them are shares.
YARN = dict(rope_type="yarn", rope_theta=50.0, factor=4.0, original_max_position_embeddings=24)
LOCAL = dict(rope_type="default", rope_theta=30.0)
F, W = "full_attention", "sliding_attention"

EXPERTS = dict(num_experts=5, num_experts_per_tok=3, moe_intermediate_size=24)
# Query heads per KV head: 1, 2 and 4. head_dim: 8 is the quotient, others are not.
CASES: dict[str, tuple[type[PreTrainedConfig], dict]] = {
    "qwen3": (Qwen3Config, dict(num_key_value_heads=2, head_dim=16, tie_word_embeddings=True)),
    "qwen3-yarn": (
        Qwen3Config,
        dict(num_key_value_heads=2, head_dim=16, rope_parameters=YARN | dict(beta_fast=2.0)),
    ),
    "qwen3-biases": (Qwen3Config, dict(num_key_value_heads=1, head_dim=8, attention_bias=True)),
    "qwen2": (Qwen2Config, dict(num_key_value_heads=4, tie_word_embeddings=True)),
    "qwen2-untied": (Qwen2Config, dict(num_key_value_heads=2, rope_parameters=LINEAR)),
    "llama3-scaling": (LlamaConfig, dict(num_key_value_heads=1, rope_parameters=LLAMA3)),
    "llama-biases": (
        LlamaConfig,
        dict(
            num_key_value_heads=4,
            head_dim=20,
            attention_bias=True,
            mlp_bias=True,
            rope_parameters=LINEAR,
            tie_word_embeddings=True,
        ),
    ),
    "mistral": (MistralConfig, dict(num_key_value_heads=2, head_dim=24, sliding_window=None)),
    "mistral-window": (MistralConfig, dict(num_key_value_heads=4, sliding_window=48)),
    "gemma3": (  # of three layers the second sees all; scores by another number than head_dim
        Gemma3TextConfig,
        dict(num_key_value_heads=2, head_dim=16, query_pre_attn_scalar=7, sliding_window=48)
        | dict(layer_types=[W, F, W], rope_parameters={F: LINEAR, W: LOCAL}),
    ),
    "gemma3-biases": (
        Gemma3TextConfig,
        dict(num_key_value_heads=1, head_dim=24, attention_bias=True, tie_word_embeddings=False)
        | dict(sliding_window=64),
    ),
    "olmo3": (
        Olmo3Config,
        dict(num_key_value_heads=2, sliding_window=48, layer_types=[W, F, W])
        | dict(rope_parameters={F: YARN, W: LOCAL}),
    ),
    "olmo3-biases": (  # windows by its pattern: the fourth layer sees all
        Olmo3Config,
        dict(num_key_value_heads=4, attention_bias=True, num_hidden_layers=4, sliding_window=48),
    ),
    "qwen3-moe": (
        Qwen3MoeConfig,
        dict(num_key_value_heads=2, head_dim=16, mlp_only_layers=[1], norm_topk_prob=True)
        | EXPERTS,
    ),
    "qwen3-moe-every-second": (  # of three layers one, and weights do not add up to 1
        Qwen3MoeConfig,
        dict(num_key_value_heads=1, decoder_sparse_step=2, attention_bias=True, **EXPERTS),
    ),
    "mixtral": (
        MixtralConfig,
        dict(num_key_value_heads=4, num_local_experts=4, num_experts_per_tok=2),
    ),
}


def tiny_config(config_class: type[PreTrainedConfig], **fields: object) -> PreTrainedConfig:
    """Of `SHAPE`, but for these fields: a model that a test has computed in no time."""
    return config_class(**{**SHAPE, **fields})


def save_case(name: str, path: Path, seed: int = 0, **overrides: object) -> Path:
    """Every weight is random, biases and norms too: zeros and ones would hide a mistake."""
    config_class, fields = CASES[name]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(config_class, **{**fields, **overrides}))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            is_norm = "norm" in parameter_name
            parameter.normal_(1.0 if is_norm else 0.0, 0.5 if parameter.ndim == 1 else 0.25)
    model.to(torch.float64).save_pretrained(path)
    return path


def by_transformers(path: Path, dtype: torch.dtype, **changes: object) -> torch.nn.Module:
    """Experts one by one: the grouped product that is the default has no float64."""
    how = {"dtype": dtype, "experts_implementation": "eager", **changes}
    return AutoModelForCausalLM.from_pretrained(path, **how).eval()


@torch.inference_mode()
def reference_logits(
    path: Path, dtype: torch.dtype, prompts: list[list[int]], **changes: object
) -> list:
    """By `transformers`, `[len(prompt), vocab_size]` for each prompt."""
    model = by_transformers(path, dtype, **changes)
    return [model(input_ids=torch.tensor([prompt])).logits[0] for prompt in prompts]
