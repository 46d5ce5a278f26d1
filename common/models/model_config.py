"""`ModelConfig`: a decoder's shape, read from a Hugging Face `config.json` and checked.

Eight families are supported: Qwen3, Qwen2 (and 2.5), Llama 3.x, Mistral, Gemma 3 (text alone),
OLMo 3, Qwen3-MoE and Mixtral. All use one decoder. They differ in biases, in norms of queries and
keys, and in having experts instead of an MLP (`models/experts/expert_config.py`):

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

Mistral's layers attend to a window, most of Gemma's and OLMo's do, and Qwen's can: `layer_windows`
lists them. Gemma's and OLMo's windowed layers rotate by other angles, and these families norm a
block's output before it is added. Gemma stores norm weights minus 1.

Defaults of absent fields are those of `transformers`.

See common/README.md#which-models"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import torch

from common.models.config_fields import positive_float, positive_int, read_ropes, refused
from common.models.layer_groups import Window
from common.models.rotary import RopeParameters
from request import check_integers

if TYPE_CHECKING:
    from common.models.experts.expert_config import ExpertsConfig

logger = logging.getLogger(__name__)
# The key in `ComposedBatch.staged` of the object that scores the hidden states of all tokens.
SCORED = "prompt_logprobs"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder's shape. Use `from_hf` for the contents of a file: it checks them."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeParameters
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    has_qk_norm: bool = False
    dtype: str | None = None  # the stored weights' dtype, by the configuration
    eos_token_ids: tuple[int, ...] = ()
    layer_windows: tuple[Window, ...] = ()  # of each layer; (): no layer has one
    blocks: tuple[str, str] = ("attention", "mlp")  # of each layer, as `model.py` names them
    experts: ExpertsConfig | None = None  # of the layers that have a block of them instead
    window_rope: RopeParameters | None = None  # of layers with a window; None: as the others
    query_pre_attn_scalar: float | None = None  # scores are divided by its root; None: head_dim
    embedding_scale: float = 1.0  # embeddings are multiplied with this
    activation: str = "silu"  # of an MLP
    norm_offset: float = 0.0  # added to a checkpoint's norm weights
    has_post_norms: bool = False  # whether a block's output is normed before it is added

    def blocks_of(self, layer: int) -> tuple[str, str]:
        attention, mlp = self.blocks
        has_experts = self.experts is not None and layer in self.experts.layers
        return attention, "experts" if has_experts else mlp

    def rotary_of(self, layer: int) -> int:
        """The rotary table that the layer uses. 0: `rope`, 1: `window_rope`."""
        if self.window_rope is None or not self.layer_windows:
            return 0
        return int(self.layer_windows[layer] is not None)

    def norm_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of norm weights. In bfloat16, adding 1 to a weight would lose most of its bits.
        Families that norm a block's output round once, after the product with the weight."""
        if self.norm_offset or not self.has_post_norms:
            return torch.float32 if self.norm_offset else dtype
        return torch.promote_types(dtype, torch.float32)

    @property
    def numerics(self) -> str:
        """The settings besides weights that KV depends on: eps, and others if not the default."""
        settings = self.query_pre_attn_scalar, self.activation
        is_usual = settings == (None, "silu")
        return f"eps {self.rms_norm_eps}" + ("" if is_usual else f" {settings}")

    @property
    def mlp_sizes(self) -> set[int]:
        """The intermediate sizes of all MLPs and experts."""
        experts = self.experts
        if experts is None:
            return {self.intermediate_size}
        has_mlps = len(experts.layers) < self.num_hidden_layers
        return {experts.intermediate_size} | ({self.intermediate_size} if has_mlps else set())

    @property
    def num_unhidden(self) -> int:
        """The number of positions of which no window hides any."""
        windows = [window for window in self.layer_windows if window is not None]
        return min([self.max_position_embeddings, *windows])

    @classmethod
    def from_hf(cls, fields: dict[str, Any]) -> ModelConfig:
        """Read the contents of a `config.json`. Raises `ValueError` for unsupported values."""
        architecture = _architecture(fields)
        family = FAMILIES[architecture]
        fields = {**family.defaults, **fields, **family.overrides}
        _refuse_unsupported(fields, family)
        num_layers = positive_int(fields, "num_hidden_layers")
        num_heads = positive_int(fields, "num_attention_heads")
        num_kv_heads = positive_int(fields, "num_key_value_heads", num_heads)
        hidden_size = positive_int(fields, "hidden_size")
        head_dim = positive_int(fields, "head_dim", family.head_dim or hidden_size // num_heads)
        max_positions = positive_int(fields, "max_position_embeddings")
        if num_heads % num_kv_heads:
            rule = f"divide num_attention_heads ({num_heads})"
            raise refused("num_key_value_heads", num_kv_heads, rule)
        if head_dim % 2:
            raise refused("head_dim", head_dim, "be even for rotary embedding")
        attention_bias = bool(fields.get("attention_bias"))
        rope, window_rope = read_ropes(fields, family.window_theta, max_positions)
        if rope.rope_type == "yarn":  # as in vLLM: the file's length may be the one without it
            lengthened = int(rope.original_max_position_embeddings * rope.factor)
            max_positions = max(max_positions, lengthened)
        query_scalar = None
        if "query_pre_attn_scalar" in family.extras:
            query_scalar = positive_float(fields, "query_pre_attn_scalar")
        return cls(
            architecture=architecture,
            vocab_size=positive_int(fields, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=positive_int(fields, "intermediate_size"),
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=max_positions,
            rms_norm_eps=positive_float(fields, "rms_norm_eps", 1e-6),
            rope=rope,
            tie_word_embeddings=bool(fields.get("tie_word_embeddings")),
            qkv_bias=attention_bias if family.has_attention_bias else family.has_qkv_bias,
            o_bias=attention_bias and family.has_attention_bias,
            mlp_bias=bool(fields.get("mlp_bias")),
            has_qk_norm=family.has_qk_norm,
            dtype=_dtype(fields),
            eos_token_ids=token_ids("config.json: eos_token_id", fields.get("eos_token_id")),
            layer_windows=_layer_windows(fields, family),
            blocks=family.blocks,
            experts=None if family.experts is None else resolve_name(family.experts)(fields),
            window_rope=window_rope,
            query_pre_attn_scalar=query_scalar,
            embedding_scale=hidden_size**0.5 if family.scales_embeddings else 1.0,
            activation=family.activation[1],
            norm_offset=family.norm_offset,
            has_post_norms=family.has_post_norms,
        )


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """Read an `eos_token_id` field: an integer, a list of integers, or null."""
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise refused(name, value, "be an integer, a list of integers or null")
    return tuple(ids)


# -- families and what they may ask for


@dataclass(frozen=True, slots=True)
class _Family:
    """`transformers`' class for `model_type`. `head_dim` is its default; None: the usual quotient.
    `sliding_window`: `"optional"` needs `use_sliding_window`, `"always"` is on unless null,
    `"pattern"` is on in all layers but each `sliding_window_pattern`th, `"never"` has none.
    `experts` reads the experts' configuration from `extras`. `window_theta` is the default base
    of layers with a window; None: they use the same angles as the others."""

    model_type: str
    has_attention_bias: bool = False  # is there a field of this name
    has_mlp_bias: bool = False
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    head_dim: int | None = None
    sliding_window: str = "never"
    blocks: tuple[str, str] = ("attention", "mlp")  # that a layer is built of
    experts: str | None = None
    activation: tuple[str, str] = ("hidden_act", "silu")  # a field, and what it must be
    window_theta: float | None = None
    scales_embeddings: bool = False
    norm_offset: float = 0.0
    has_post_norms: bool = False
    extras: frozenset[str] = frozenset()  # fields that not every family has
    defaults: Mapping[str, Any] = field(default_factory=dict)  # values of absent fields
    overrides: Mapping[str, Any] = field(default_factory=dict)  # values of fields it does not read


def _sizes(*sizes: int | None, **others: Any) -> dict[str, Any]:
    """A `transformers` class's defaults, in this order. None: as many KV heads as heads."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    names += ("num_attention_heads", "num_key_value_heads", "max_position_embeddings")
    return dict(zip(names, sizes, strict=True)) | others


_OF_EXPERTS = {"num_experts_per_tok", "output_router_logits", "router_aux_loss_coef"}
FAMILIES = {
    "Qwen3ForCausalLM": _Family(
        "qwen3",
        has_attention_bias=True,
        has_qk_norm=True,
        head_dim=128,
        sliding_window="optional",
        defaults=_sizes(151_936, 4096, 22_016, 32, 32, 32, 32_768, sliding_window=4096),
    ),
    "Qwen2ForCausalLM": _Family(
        "qwen2",
        has_qkv_bias=True,
        sliding_window="optional",
        defaults=_sizes(151_936, 4096, 22_016, 32, 32, 32, 32_768, sliding_window=4096),
    ),
    "LlamaForCausalLM": _Family(
        "llama",
        has_attention_bias=True,
        has_mlp_bias=True,
        defaults=_sizes(32_000, 4096, 11_008, 32, 32, None, 2048, eos_token_id=2),
    ),
    "MistralForCausalLM": _Family(
        "mistral",
        sliding_window="always",
        defaults=_sizes(32_000, 4096, 14_336, 32, 32, 8, 131_072, eos_token_id=2)
        | {"sliding_window": 4096},
    ),
    "Gemma3ForCausalLM": _Family(
        "gemma3_text",
        has_attention_bias=True,
        has_qk_norm=True,
        head_dim=256,
        sliding_window="pattern",
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        window_theta=1e4,
        scales_embeddings=True,
        norm_offset=1.0,
        has_post_norms=True,
        extras=frozenset({"hidden_activation", "query_pre_attn_scalar", "rope_local_base_freq"})
        | {"sliding_window_pattern", "cache_implementation"},
        defaults=_sizes(262_208, 2304, 9216, 26, 8, 4, 131_072, eos_token_id=1)
        | {"sliding_window": 4096, "query_pre_attn_scalar": 256, "rope_theta": 1e6}
        | {"tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh"},
    ),
    "Olmo3ForCausalLM": _Family(
        "olmo3",
        has_attention_bias=True,
        sliding_window="pattern",
        window_theta=5e5,
        blocks=("post-norm attention", "post-norm mlp"),
        has_post_norms=True,
        defaults=_sizes(50_304, 4096, 11_008, 32, 32, None, 2048, eos_token_id=50_279)
        | {"sliding_window": 4096, "rope_theta": 5e5, "rms_norm_eps": 1e-5},
        extras=frozenset({"sliding_window_pattern", "rope_local_base_freq"}),
        overrides={"sliding_window_pattern": 4, "rope_local_base_freq": 5e5},
    ),
    "Qwen3MoeForCausalLM": _Family(
        "qwen3_moe",
        has_attention_bias=True,
        has_qk_norm=True,
        sliding_window="optional",
        experts="common.models.experts.expert_config:qwen3_moe",
        extras=frozenset({"num_experts", "num_local_experts", "decoder_sparse_step", *_OF_EXPERTS})
        | {"moe_intermediate_size", "norm_topk_prob", "mlp_only_layers"},
        defaults=_sizes(151_936, 2048, 6144, 24, 32, 4, 32_768, sliding_window=4096)
        | {"num_experts_per_tok": 8, "moe_intermediate_size": 768},
        overrides={"max_window_layers": 0},  # a window is one of all layers
    ),
    "MixtralForCausalLM": _Family(
        "mixtral",
        sliding_window="always",
        experts="common.models.experts.expert_config:mixtral",
        extras=frozenset({"num_local_experts", "router_jitter_noise", *_OF_EXPERTS}),  # in training
        defaults=_sizes(32_000, 4096, 14_336, 32, 32, 8, 131_072, eos_token_id=2)
        | {"num_local_experts": 8, "num_experts_per_tok": 2}
        | {"rms_norm_eps": 1e-5, "rope_theta": 1e6},
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
_UNSUPPORTED = (
    "expert", "moe", "rout", "topk", "scoring", "n_group", "dense_replace", "quantization",
    "softcap", "vision", "audio", "text_config", "multiplier",
    "cross_attention", "alibi", "clip_qkv", "logits_scaling", "logit_scale", "no_rope_layer",
    "dual_chunk", "nextn", "mrope", "parallel_residual", "attention_chunk_size",
    "bidirectional", "pruned_heads", "is_encoder_decoder", "relative_attention",
    "chunk_size_feed_forward", "output_gate",
)  # fmt: skip
_NEUTRAL = (None, False, 0, 1, [], {}, "")
# Fields that are read below, and fields that do not change what the decoder computes.
_KNOWN = {
    "architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size",
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "attention_bias", "mlp_bias",
    "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "sliding_window",
    "use_sliding_window", "max_window_layers", "layer_types", "dtype", "torch_dtype",
    "original_max_position_embeddings",
    "eos_token_id", "bos_token_id", "pad_token_id", "transformers_version", "attention_dropout",
    "initializer_range", "use_cache", "pretraining_tp", "return_dict", "output_attentions",
    "output_hidden_states", "problem_type", "id2label", "label2id", "name_or_path", "auto_map",
}  # fmt: skip


def _architecture(fields: dict[str, Any]) -> str:
    model_type = fields.get("model_type")
    names = fields.get("architectures") or [
        name for name, family in FAMILIES.items() if family.model_type == model_type
    ]
    if not isinstance(names, list) or len(names) != 1 or names[0] not in FAMILIES:
        shown = fields.get("architectures") or f"none with model_type {model_type!r}"
        suffix = f": {found}" if (found := refusal_reason(names)) else ""
        raise ValueError(f"architectures must be one of {', '.join(FAMILIES)}, got {shown}{suffix}")
    expected = FAMILIES[names[0]].model_type
    if model_type not in (None, expected):
        raise refused("model_type", model_type, f"be {expected!r} with {names[0]}")
    return names[0]


def _is_unsupported(name: str) -> bool:
    return any(part in name for part in _UNSUPPORTED)


def _refuse_unsupported(fields: dict[str, Any], family: _Family) -> None:
    if code := fields.get("auto_map"):
        rule = "be absent, because a checkpoint's own code is never run here; remove the field if "
        rule += f"transformers' {family.model_type} is the same model"
        raise refused("auto_map", code, rule)
    for name, value in fields.items():
        if name in family.extras or not _is_unsupported(name):
            continue
        is_cap = "softcap" in name  # one of 1 caps
        if value is True or value not in (_NEUTRAL[:1] if is_cap else _NEUTRAL):
            allowed = "absent or null" if is_cap else "absent, null, false, 0 or 1"
            raise refused(name, value, f"be {allowed}, because this decoder has no such feature")
    name, only = family.activation
    if fields.get(name, only) != only:
        raise refused(name, fields[name], f"be {only!r}")
    has_biases = {  # Qwen2's do not depend on the field
        "attention_bias": family.has_attention_bias or family.has_qkv_bias,
        "mlp_bias": family.has_mlp_bias,
    }
    for name, has in has_biases.items():
        if fields.get(name) and not has:
            raise refused(name, fields[name], f"be false in {family.model_type}")
    known = _KNOWN | family.extras | ({"use_qk_norm"} if family.has_qk_norm else set())
    names = [name for name in sorted(fields.keys() - known) if not name.startswith("_")]
    if unknown := [name for name in names if not _is_unsupported(name)]:
        logger.warning("ignoring unknown fields of config.json: %s", ", ".join(unknown))


def _layer_windows(fields: dict[str, Any], family: _Family) -> tuple[Window, ...]:
    num_layers = positive_int(fields, "num_hidden_layers")
    kind = family.sliding_window
    window = fields.get("sliding_window")
    if kind == "optional":
        window = window if fields.get("use_sliding_window") else None
        first = fields.get("max_window_layers", 28) if window is not None else num_layers
        check_integers(0, max_window_layers=first)
        derived = ["full_attention"] * min(first, num_layers)
        derived += ["sliding_attention"] * (num_layers - len(derived))
    elif kind == "pattern":
        every = positive_int(fields, "sliding_window_pattern", 6)
        derived = [("sliding" if (i + 1) % every else "full") for i in range(num_layers)]
        derived = [f"{name}_attention" for name in derived]
    elif window is not None and kind == "never":
        raise refused("sliding_window", window, f"be null in {family.model_type}")
    else:
        derived = ["full_attention" if window is None else "sliding_attention"] * num_layers
    layer_types = fields.get("layer_types") or derived
    allowed = ("full_attention",) if window is None else ("full_attention", "sliding_attention")
    if not isinstance(layer_types, list):
        raise refused("layer_types", layer_types, "be a list")
    if unsupported := [kind for kind in layer_types if kind not in allowed]:
        raise ValueError(
            f"layer_types must be of {', '.join(allowed)} if sliding_window is {window!r}, got "
            f"{unsupported[:1]}"
        )
    if layer_types and len(layer_types) != num_layers:
        raise refused("layer_types", layer_types, f"have {num_layers} entries, one for each layer")
    if window is None or (kind != "always" and "sliding_attention" not in layer_types):
        return ()
    window = positive_int({"sliding_window": window}, "sliding_window")
    if window > (max_positions := positive_int(fields, "max_position_embeddings")):
        says = "sliding_window is %d and max_position_embeddings %d: it hides nothing, %s"
        logger.warning(says, window, max_positions, "so all layers are served as full attention")
    if kind == "always":
        return (window,) * num_layers
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _dtype(fields: dict[str, Any]) -> str | None:
    value = fields.get("dtype", fields.get("torch_dtype"))
    return value.removeprefix("torch.") if isinstance(value, str) else None


def refusal_reason(architectures: object) -> str | None:
    """Why a model is not served. None: not known. `architectures` is from a `config.json`."""
    given = architectures if isinstance(architectures, list) else []
    names = [n for n in given if isinstance(n, str) and not fnmatchcase(n, "*Head*Model")]
    for pattern, reason in REFUSAL_REASONS.items():
        if any(fnmatchcase(name, pattern) for name in names):
            return reason
    return None
