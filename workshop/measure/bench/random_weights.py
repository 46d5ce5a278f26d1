"""A model without a file: the shape of Qwen3-0.6B, or any other, with weights from a seed.

    python -m workshop.bench.random_weights mixtral DIRECTORY

writes a small one of a family to try the engine with: `make demo ARGS="--model DIRECTORY"`. Its
tokenizer is the shipped one, and its output is noise."""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from common.engine_config import SHIPPED_CHECKPOINT
from common.models.blocks import CheckpointTensor
from common.models.loader import LoadedModel, read_json
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


# `config.json` of small ones, in addition to the sizes that all have.
_SIZES = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=4)
_HEADS = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=32)
FAMILIES: dict[str, dict[str, object]] = {
    "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": None},
    "gemma3-text": {
        "architectures": ["Gemma3ForCausalLM"],
        "query_pre_attn_scalar": 32,
        "sliding_window": 64,
        "sliding_window_pattern": 3,
    },
    "olmo3": {"architectures": ["Olmo3ForCausalLM"], "sliding_window": 64},
    "qwen3-moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
}


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


def stored(tensor: CheckpointTensor) -> torch.Tensor:
    """A tensor's checkpoint form: a norm that we hold once per head is one tensor there."""
    assert tensor.target is not None  # no other process has a part of this model
    is_per_head = tuple(tensor.target.shape) != tensor.shape
    held = tensor.target[0] if is_per_head else tensor.target
    return held - tensor.offset if tensor.offset else held  # a copy only where needed


def write_random(family: str, path: Path, seed: int = 0) -> None:
    """Write a small checkpoint, with the shipped one's tokenizer. Raises `ValueError` for a family
    that is not one of `FAMILIES`."""
    if family not in FAMILIES:
        raise ValueError(f"family must be {', '.join(FAMILIES)}, got {family!r}")
    shipped = read_json(SHIPPED_CHECKPOINT / "config.json")
    of_tokens = {k: shipped[k] for k in ("vocab_size", "eos_token_id", "max_position_embeddings")}
    fields = {**_SIZES, **_HEADS, **of_tokens, "dtype": "float32", **FAMILIES[family]}
    fields["model_type"] = family.replace("-", "_")
    decoder = random_model(ModelConfig.from_hf(fields), seed).model
    path.mkdir(parents=True, exist_ok=True)
    weights = {n: stored(t).clone() for n, t in decoder.checkpoint_tensors().items()}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SHIPPED_CHECKPOINT / name, path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a small checkpoint with random weights.")
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write_random(arguments.family, arguments.directory, arguments.seed)
    print(f'make demo ARGS="--model {arguments.directory}"')


if __name__ == "__main__":
    main()
