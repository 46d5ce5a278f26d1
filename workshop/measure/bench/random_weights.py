"""A model without a file: the shape of Qwen3-0.6B, or any other, with weights from a seed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from common.models.blocks import CheckpointTensor
from common.models.loader import LoadedModel
from common.models.model import DecoderModel
from common.models.model_config import ModelConfig
from common.models.rotary import RopeParameters

QWEN3_0_6B = ModelConfig(  # https://huggingface.co/Qwen/Qwen3-0.6B
    architecture="Qwen3ForCausalLM",
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=40960,
    rms_norm_eps=1e-6,
    rope=RopeParameters(theta=1e6),
    tie_word_embeddings=True,
    has_qk_norm=True,
    dtype="bfloat16",
    eos_token_ids=(151645,),
)


def shape_of(
    layers: int,
    hidden: int,
    inner: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocab: int,
    **others: Any,
) -> ModelConfig:
    """Return Qwen3-0.6B with other sizes, and without an end of text."""
    sizes = {
        "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim,
        "vocab_size": vocab, "eos_token_ids": (),
    }  # fmt: skip
    return replace(QWEN3_0_6B, **sizes | others)


def random_model(
    config: ModelConfig,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> LoadedModel:
    """Draw weights from N(0, 0.02), with norms 1 and biases 0: a new model's usual start."""
    decoder = DecoderModel(config, dtype, device)
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in decoder.named_parameters():
        if name.endswith("norm_weight"):
            parameter.fill_(1.0)
        elif name.endswith("bias"):
            parameter.zero_()
        else:
            parameter.normal_(0.0, 0.02, generator=generator)
    return LoadedModel(decoder, config, config.eos_token_ids)


def stored(name: str, tensor: CheckpointTensor, config: ModelConfig) -> torch.Tensor:
    """A tensor's checkpoint form: a norm that we hold once per head is one tensor there."""
    assert tensor.target is not None  # no other process has a part of this model
    is_per_head = tuple(tensor.target.shape) != tensor.shape
    held = tensor.target[0] if is_per_head else tensor.target
    return held - config.norm_offset if name.endswith("norm.weight") else held
