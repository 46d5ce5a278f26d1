"""A model without a file: the shape of Qwen3-0.6B, or any other, with weights from a seed."""

from __future__ import annotations

import torch

from common.loader import LoadedModel
from common.model import DecoderModel
from common.model_config import ModelConfig
from common.rotary import RopeParameters

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


def random_model(
    config: ModelConfig,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> LoadedModel:
    """Weights drawn from N(0, 0.02), norms 1, biases 0: a new model's usual start."""
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
