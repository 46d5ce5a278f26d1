"""The model families that are served, and what is refused by name.

All families use one decoder. `FAMILIES` says what it does differently for each; sizes and defaults
of absent fields are those of `transformers`' configuration classes.

    family     biases of q, k, v    bias of o         biases of the MLP    q_norm, k_norm
    Qwen3      attention_bias       attention_bias    none                 yes
    Qwen2      always               none              none                 no
    Llama      attention_bias       attention_bias    mlp_bias             no
    Mistral    none                 none              none                 no
    Gemma 3    attention_bias       attention_bias    none                 yes
    OLMo 3     attention_bias       attention_bias    none                 of all heads
    Qwen3-MoE  attention_bias       attention_bias    none                 yes
    Mixtral    none                 none              none                 no

A feature that a configuration asks for and this decoder lacks raises a `ValueError` that names the
field: a model that runs without it answers fluently and wrongly. Unknown fields are ignored, as
`transformers` ignores them, and named in the log.

See common/README.md#which-models"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from common.models.experts.expert_config import ExpertsConfig, mixtral, qwen3_moe

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Family:
    """What the decoder does for one of `transformers`' model types."""

    model_type: str
    has_qkv_bias: bool = False  # always; others have biases if `attention_bias` says so
    has_qk_norm: bool = False  # of each head
    has_whole_qk_norm: bool = False  # of all heads as one vector
    experts: Callable[[Any], ExpertsConfig | None] | None = None  # reads their configuration
    scales_embeddings: bool = False
    norm_offset: float = 0.0  # added to a checkpoint's norm weights
    has_input_norms: bool = True
    has_post_norms: bool = False
    reads: frozenset[str] = frozenset()  # fields that other families are refused for


_EXPERTS = frozenset({"num_local_experts", "num_experts_per_tok", "output_router_logits"})
_EXPERTS |= {"router_aux_loss_coef"}
FAMILIES = {
    "Qwen3ForCausalLM": Family("qwen3", has_qk_norm=True),
    "Qwen2ForCausalLM": Family("qwen2", has_qkv_bias=True, reads=frozenset({"attention_bias"})),
    "LlamaForCausalLM": Family("llama"),
    "MistralForCausalLM": Family("mistral"),
    "Gemma3ForCausalLM": Family(
        "gemma3_text",
        has_qk_norm=True,
        scales_embeddings=True,
        norm_offset=1.0,
        has_post_norms=True,
    ),
    "Olmo3ForCausalLM": Family(
        "olmo3",
        has_whole_qk_norm=True,
        has_input_norms=False,
        has_post_norms=True,
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        has_qk_norm=True,
        experts=qwen3_moe,
        reads=_EXPERTS | {"num_experts", "moe_intermediate_size", "norm_topk_prob"},
    ),
    "MixtralForCausalLM": Family(
        "mixtral",
        experts=mixtral,
        reads=_EXPERTS | {"router_jitter_noise"},  # in training
    ),
}
SUPPORTED_ARCHITECTURES = tuple(FAMILIES)

# Architectures that are not served, and why: the first pattern that matches applies. Architectures
# named neither here nor in the families are refused too, without a reason, because they have not
# been examined. A family takes precedence over a pattern.
_STATES = "three of four layers keep a state instead of keys and values"
REFUSAL_REASONS: dict[str, str] = {
    "GptOssForCausalLM": "its attention has a sink in each head, and its experts are in MXFP4",
    "Qwen3Next*": _STATES,
    "Qwen3_5*": _STATES,
    "*Mamba*": "its layers, or most, keep a state instead of keys and values",
    "DeepseekV[23]*": "its keys and values are compressed (MLA), and experts come in groups",
    "Gemma2ForCausalLM": "scores and logits are capped (attn_logit_softcapping)",
    "Olmo2ForCausalLM": "not compared with a reference; OLMo 3 is served",
    "*ForConditionalGeneration": "it reads pictures or sound, or has an encoder, too",
    "*ForMaskedLM": "it is an encoder, which has no next token",
    "*For*Classification": "it classifies, and has no next token",
    "*Model": "it has no head, so no next token",
}

# Parts of field names for features that this decoder does not have.
_UNSUPPORTED = re.compile(
    "expert|moe|rout|topk|scoring|n_group|dense_replace|quantization|softcap|vision|audio|"
    "text_config|multiplier|cross_attention|alibi|clip_qkv|logits_scaling|logit_scale|"
    "no_rope_layer|dual_chunk|nextn|mrope|parallel_residual|attention_chunk_size|bidirectional|"
    "pruned_heads|is_encoder_decoder|relative_attention|chunk_size_feed_forward|output_gate"
)
# Fields whose feature the decoder has, in families that have the field.
_OF_SOME = {"attention_bias", "mlp_bias", "sliding_window"}
_NEUTRAL = (None, False, 0, 1, [], {}, "")
# Names that `transformers` reads besides its classes' fields: old ones, and a size that follows.
OLD_NAMES = {
    "model_type", "rope_theta", "rope_scaling", "torch_dtype", "partial_rotary_factor",
    "original_max_position_embeddings", "sliding_window_pattern", "rope_local_base_freq",
    "head_dim", "output_attentions", "name_or_path", "auto_map", "cache_implementation",
    "max_window_layers", "use_sliding_window", "pretraining_tp",
}  # fmt: skip


def refused(name: str, value: object, rule: str) -> ValueError:
    text = repr(value)
    shown = text if len(text) <= 200 else f"{text[:200]} ..."
    return ValueError(f"{name} must {rule}, got {shown}")


def find_architecture(fields: dict[str, Any]) -> str:
    """Return the served architecture of a `config.json`. Raises `ValueError` for another one."""
    model_type = fields.get("model_type")
    names = fields.get("architectures") or [
        name for name, family in FAMILIES.items() if family.model_type == model_type
    ]
    if not isinstance(names, list) or len(names) != 1 or names[0] not in FAMILIES:
        shown = fields.get("architectures") or f"none with model_type {model_type!r}"
        reason = refusal_reason(names)
        suffix = "" if reason is None else f": {reason}"
        raise ValueError(f"architectures must be one of {', '.join(FAMILIES)}, got {shown}{suffix}")
    expected = FAMILIES[names[0]].model_type
    if model_type not in (None, expected):
        raise refused("model_type", model_type, f"be {expected!r} with {names[0]}")
    return names[0]


def refusal_reason(architectures: object) -> str | None:
    """Why a model is not served. None: not known. `architectures` is from a `config.json`."""
    names = map(str, architectures) if isinstance(architectures, list) else ()
    for name in names:
        for pattern, reason in REFUSAL_REASONS.items():
            if fnmatchcase(name, pattern) and "Head" not in name:
                return reason
    return None


def refuse_unsupported(fields: dict[str, Any], family: Family, known: Collection[str]) -> None:
    """Raise `ValueError` if a field asks for a feature that this decoder lacks. `known` are the
    fields that `transformers` reads; the log names the others, which are ignored."""
    if code := fields.get("auto_map"):
        rule = "be absent, because a checkpoint's own code is never run here; remove the field if "
        rule += f"transformers' {family.model_type} is the same model"
        raise refused("auto_map", code, rule)
    for name, value in fields.items():
        if name in _OF_SOME and name not in known and value:
            raise refused(name, value, f"be absent in {family.model_type}")
        # A cap of 1 caps; other numbers of 0 and 1 change nothing.
        neutral = (None,) if "softcap" in name else _NEUTRAL
        is_asked_for = value is True or value not in neutral
        if is_asked_for and _UNSUPPORTED.search(name) and name not in family.reads:
            allowed = "absent, null, false, 0 or 1" if neutral is _NEUTRAL else "absent or null"
            raise refused(name, value, f"be {allowed}, because this decoder has no such feature")
    ignored = fields.keys() - known - _OF_SOME
    if family.has_qk_norm:
        ignored -= {"use_qk_norm"}  # its layers norm anyway
    if unknown := [n for n in sorted(ignored) if n[0] != "_" and not _UNSUPPORTED.search(n)]:
        logger.warning("ignoring unknown fields of config.json: %s", ", ".join(unknown))
