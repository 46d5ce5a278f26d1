"""`ModelConfig`: a decoder's shape, read from a Hugging Face `config.json` and checked.

`transformers`' configuration class gives the defaults of absent fields, old spellings and rotary
angles. `families.py` says what our decoder does for each family, and what is refused by name.

Mistral's layers attend to a window, most of Gemma's and OLMo's do, and Qwen's can: `layer_windows`
lists them. Gemma's and OLMo's windowed layers rotate by other angles, and these families norm a
block's output before it is added. Gemma stores norm weights minus 1.

See common/README.md#which-models"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, fields
from typing import Any

import torch

from common.models.experts.expert_config import ExpertsConfig
from common.models.families import (
    FAMILIES,
    OLD_NAMES,
    Family,
    find_architecture,
    refuse_unsupported,
    refused,
)
from common.models.layer_groups import Window
from common.models.rotary import RopeParameters
from request import check_integers

# The key in `ComposedBatch.staged` of the object that scores the hidden states of all tokens.
SCORED = "prompt_logprobs"
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
_ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
_WITH_WINDOW = "sliding_attention"
_FULL = "full_attention"
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_ROPE_FIELDS = {
    "rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor",
    "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "mscale",
    "mscale_all_dim", "truncate", "partial_rotary_factor",
}  # fmt: skip


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
    has_qk_norm: bool = False  # of each head
    has_whole_qk_norm: bool = False  # of all heads as one vector
    dtype: str | None = None  # the stored weights' dtype, by the configuration
    eos_token_ids: tuple[int, ...] = ()
    layer_windows: tuple[Window, ...] = ()  # of each layer; (): no layer has one
    experts: ExpertsConfig | None = None  # of the layers that have them instead of an MLP
    window_rope: RopeParameters | None = None  # of layers with a window; None: as the others
    query_pre_attn_scalar: float | None = None  # scores are divided by its root; None: head_dim
    embedding_scale: float = 1.0  # embeddings are multiplied with this
    activation: str = "silu"  # of an MLP
    norm_offset: float = 0.0  # added to a checkpoint's norm weights
    has_input_norms: bool = True  # whether a block's input is normed
    has_post_norms: bool = False  # whether a block's output is normed before it is added

    def rotary_of(self, layer: int) -> int:
        """The rotary table that the layer uses. 0: `rope`, 1: `window_rope`."""
        if self.window_rope is None or not self.layer_windows:
            return 0
        return int(self.layer_windows[layer] is not None)

    def norm_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of norm weights. In bfloat16, adding 1 to a weight would lose most of its bits.
        Families that norm a block's output round once, after the product with the weight."""
        if self.norm_offset:
            return torch.float32
        return torch.promote_types(dtype, torch.float32) if self.has_post_norms else dtype

    @property
    def numerics(self) -> str:
        """The settings besides weights that KV depends on."""
        attention_scale = self.query_pre_attn_scalar
        embedding_scale = self.embedding_scale
        return f"{self.rms_norm_eps} {attention_scale} {embedding_scale} {self.activation}"

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
    def from_hf(cls, given: dict[str, Any]) -> ModelConfig:
        """Read the contents of a `config.json`. Raises `ValueError` for unsupported values."""
        architecture = find_architecture(given)
        family = FAMILIES[architecture]
        hf = _read_by_transformers(given, family)
        sizes = {name: getattr(hf, name) for name in _SIZES}
        num_heads = hf.num_attention_heads
        head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // num_heads
        check_integers(1, **sizes, head_dim=head_dim)
        if num_heads % hf.num_key_value_heads:
            rule = f"divide num_attention_heads ({num_heads})"
            raise refused("num_key_value_heads", hf.num_key_value_heads, rule)
        if head_dim % 2:
            raise refused("head_dim", head_dim, "be even for rotary embedding")
        act_field = "hidden_activation" if hasattr(hf, "hidden_activation") else "hidden_act"
        activation = getattr(hf, act_field)
        if activation not in _ACTIVATIONS:
            raise refused(act_field, activation, f"be {' or '.join(_ACTIVATIONS)}")
        have_own_rope = _WITH_WINDOW in hf.rope_parameters  # layers with a window
        for name in sorted(hf.rope_parameters.keys() - {_FULL, _WITH_WINDOW}):
            if have_own_rope:
                value = hf.rope_parameters[name]
                raise refused(f"rope_parameters: {name}", value, f"be in {_FULL}")
        rope = _rope(hf, _FULL if have_own_rope else None)
        if rope.rope_type == "yarn":  # as in vLLM: the file's length may be the one without it
            yarn = hf.rope_parameters.get(_FULL, hf.rope_parameters)
            lengthened = int(yarn["original_max_position_embeddings"] * yarn["factor"])
            sizes["max_position_embeddings"] = max(hf.max_position_embeddings, lengthened)
        has_attention_bias = getattr(hf, "attention_bias", False) and not family.has_qkv_bias
        return cls(
            architecture=architecture,
            **sizes,
            head_dim=head_dim,
            rms_norm_eps=hf.rms_norm_eps,
            rope=rope,
            tie_word_embeddings=hf.tie_word_embeddings,
            qkv_bias=has_attention_bias or family.has_qkv_bias,
            o_bias=has_attention_bias,
            mlp_bias=getattr(hf, "mlp_bias", False),
            has_qk_norm=family.has_qk_norm,
            has_whole_qk_norm=family.has_whole_qk_norm,
            dtype=None if hf.dtype is None else str(hf.dtype).removeprefix("torch."),
            eos_token_ids=token_ids("config.json: eos_token_id", hf.eos_token_id),
            layer_windows=_layer_windows(hf),
            experts=None if family.experts is None else family.experts(hf),
            window_rope=_rope(hf, _WITH_WINDOW) if have_own_rope else None,
            query_pre_attn_scalar=getattr(hf, "query_pre_attn_scalar", None),
            embedding_scale=hf.hidden_size**0.5 if family.scales_embeddings else 1.0,
            activation=activation,
            norm_offset=family.norm_offset,
            has_input_norms=family.has_input_norms,
            has_post_norms=family.has_post_norms,
        )


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """Read an `eos_token_id` field: an integer, a list of integers, or null."""
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if any(type(i) is not int for i in ids):
        raise refused(name, value, "be an integer, a list of integers or null")
    return tuple(ids)


def _read_by_transformers(given: dict[str, Any], family: Family) -> Any:
    """Return the configuration with `transformers`' defaults. Fields that its class does not read
    are not in it."""
    from transformers import AutoConfig  # takes seconds, so it is imported only here

    declared = {field.name for field in fields(type(AutoConfig.for_model(family.model_type)))}
    known = declared | OLD_NAMES | family.reads
    refuse_unsupported(given, family, known)
    read = {name: deepcopy(value) for name, value in given.items() if name in known}
    try:
        return AutoConfig.for_model(**read | {"model_type": family.model_type})
    except Exception as error:  # the library's checks share no base
        reason = " ".join(str(error).split())
        raise ValueError(f"config.json cannot be read: {reason}") from error


def _rope(hf: Any, layer_type: str | None) -> RopeParameters:
    """Read the rotary parameters of all layers, or of those of a type."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = hf.rope_parameters if layer_type is None else hf.rope_parameters[layer_type]
    rope_type = parameters.get("rope_type", "default")
    if rope_type not in _ROPE_TYPES:
        raise refused("rope_type", rope_type, f"be {', '.join(_ROPE_TYPES)}")
    for name in sorted(parameters.keys() - _ROPE_FIELDS):
        raise refused(f"rope_parameters: {name}", parameters[name], "be absent (not supported)")
    if parameters.get("partial_rotary_factor") not in (None, 1):
        raise refused("partial_rotary_factor", parameters["partial_rotary_factor"], "be 1")
    theta = parameters["rope_theta"]
    if rope_type == "default":
        return RopeParameters(theta=theta)
    inv_freq, factor = ROPE_INIT_FUNCTIONS[rope_type](hf, layer_type=layer_type)
    return RopeParameters(
        theta=theta,
        rope_type=rope_type,
        inv_freq=tuple(inv_freq.tolist()),
        attention_factor=factor,
    )


def _layer_windows(hf: Any) -> tuple[Window, ...]:
    window = getattr(hf, "sliding_window", None)
    layer_types = getattr(hf, "layer_types", None)
    if layer_types is None:
        layer_types = [_FULL if window is None else _WITH_WINDOW] * hf.num_hidden_layers
    windows = {_FULL: None, _WITH_WINDOW: window}
    for layer_type in layer_types:
        if layer_type not in windows or (layer_type == _WITH_WINDOW and window is None):
            rule = f"be {_FULL}, or {_WITH_WINDOW} with a sliding_window"
            raise refused("layer_types", layer_type, rule)
    if _WITH_WINDOW not in layer_types:
        return ()
    check_integers(1, sliding_window=window)
    return tuple(windows[layer_type] for layer_type in layer_types)
