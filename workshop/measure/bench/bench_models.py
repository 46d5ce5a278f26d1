"""The models of a benchmark: one set of weights, read by our engine and by `transformers`."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from common.engine_config import SHIPPED_CHECKPOINT
from common.models.loader import LoadedModel, load_model
from common.models.model_config import ModelConfig
from common.models.processor import is_bfloat16_fast
from workshop.measure.bench.random_weights import QWEN3_0_6B, random_model, stored
from workshop.measure.bench.vllm_system import VllmServer


@dataclass(frozen=True, slots=True)
class BenchModels:
    """One set of weights as two models, and processes that read a copy of the weights."""

    loaded: LoadedModel
    hf: Qwen3ForCausalLM
    servers: dict[str, VllmServer] = field(default_factory=dict)


def load_models(name: str, dtype: torch.dtype) -> BenchModels:
    """Load `name`, one of `WORKLOADS` or the directory of a Qwen3 checkpoint. float32 weights have
    the rounded values that bfloat16 ones would have."""
    if name == "qwen3-0.6b":
        loaded = random_model(QWEN3_0_6B, seed=0, dtype=dtype)
    else:
        loaded = load_model(SHIPPED_CHECKPOINT if name == "tiny" else name, dtype)
    if dtype == torch.float32:
        for parameter in loaded.model.parameters():
            parameter.copy_(parameter.bfloat16())
    return BenchModels(loaded, make_twin(loaded))


def choose_dtype(name: str) -> torch.dtype:
    """Resolve `"auto"`: bfloat16 if this CPU multiplies it natively, else float32."""
    if name == "auto":
        return torch.bfloat16 if is_bfloat16_fast() else torch.float32
    return getattr(torch, name)


def make_twin(loaded: LoadedModel) -> Qwen3ForCausalLM:
    """Build the model in `transformers`. Its parameters are views of `loaded`'s."""
    config = loaded.config
    with torch.device("meta"):
        twin = Qwen3ForCausalLM(_hf_config(config))
    weights = {n: stored(n, t, loaded.config) for n, t in loaded.model.checkpoint_tensors().items()}
    embedding = weights["model.embed_tokens.weight"]
    weights.setdefault("lm_head.weight", embedding)
    twin.load_state_dict(weights, strict=True, assign=True)
    # The only tensor that is not in a checkpoint.
    rotary = type(twin.model.rotary_emb)(config=twin.config)
    twin.model.rotary_emb = rotary.to(embedding.device)
    return twin.requires_grad_(False).eval()


def _hf_config(config: ModelConfig) -> Qwen3Config:
    if config.architecture != "Qwen3ForCausalLM" or config.rope.rope_type != "default":
        raise ValueError(
            "architecture must be Qwen3ForCausalLM with default rotary embedding, got "
            f"{config.architecture} with {config.rope.rope_type}"
        )
    names = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    names += "num_key_value_heads head_dim max_position_embeddings rms_norm_eps tie_word_embeddings"
    return Qwen3Config(
        **{name: getattr(config, name) for name in names.split()},
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
        attention_bias=config.qkv_bias,
    )
