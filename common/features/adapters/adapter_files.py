"""LoRA adapters in PEFT's format: a directory with two files, read strictly.

    adapter_config.json            the matrices, their ranks, and the scale of the product
    adapter_model.safetensors      two matrices, A and B, for each of them

        y = W x + scale * B (A x)      A [rank, in], B [out, rank]

    scale = alpha / rank, or alpha / sqrt(rank) with `use_rslora`; it is folded into B here.

As with a checkpoint (`loader.py`), every tensor must be used exactly once and every matrix that the
configuration matches must exist: an adapter that changes half of its matrices still generates text.
Variants of LoRA that compute something else (DoRA, biases, whole modules) are rejected by name.

Sources: Hu et al., LoRA (arXiv 2106.09685); Kalajdzievski, rsLoRA (arXiv 2312.03732); PEFT 0.21.

See 04_scheduler/beyond/ADAPTERS.md"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import regex
import torch
from safetensors.torch import load_file

from common.models.loader import read_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# Extensions of LoRA beyond its two matrices. An adapter that sets one of these fields is rejected.
_REFUSED = {
    "use_dora": "DoRA also scales each output",
    "lora_bias": "B has a bias",
    "modules_to_save": "whole modules are replaced",
    "trainable_token_indices": "rows of the embedding are replaced",
    "alora_invocation_tokens": "an activated adapter begins in the middle of a prompt",
    "layer_replication": "the model has other layers",
    "target_parameters": "parameters outside of matrices are changed",
    "use_qalora": "its inputs are grouped",
    "use_bdlora": "its matrices are of diagonal blocks",
    "fan_in_fan_out": "its matrices are transposed",
    "megatron_config": "its matrices are Megatron's",
    "arrow_config": "it chooses among other adapters",
    "kasa_config": "it changes the base model's weights",
    "velora_config": "its inputs are compressed",
    "monteclora_config": "its matrices are drawn",
    "layers_to_transform": "only some layers are changed",
    "layers_pattern": "only some layers are changed",
}
# An expression of ten characters, such as `(a|aa)+c`, can keep a matcher busy for years.
TIMEOUT_S = 1.0

# Initialisations for training that leave the base model unchanged.
_KEEPS_THE_BASE = (True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True)
class LowRank:
    """The low-rank update of one matrix of the base model."""

    a: torch.Tensor  # [rank, in]
    b: torch.Tensor  # [out, rank], scaled


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter. Adapters with equal `digest` (of the content) compute the same. `matrices` is
    keyed by names in the base model's checkpoint, such as `model.layers.0.self_attn.q_proj`."""

    digest: str
    matrices: Mapping[str, LowRank]


def read_adapter(
    directory: str | Path,
    shapes: Mapping[str, tuple[int, ...]],  # of all matrices of the base model: [out, in]
    max_rank: int,
    dtype: torch.dtype,
) -> Adapter:
    """Read an adapter. Raises `FileNotFoundError` if a file is missing, and `ValueError` for an
    adapter that is incomplete, not for this model, an extension of LoRA, or unreadable."""
    path = Path(directory).expanduser()
    for name in (CONFIG, WEIGHTS):
        if not (path / name).is_file():
            raise FileNotFoundError(f"{path} must be a LoRA adapter's directory, but has no {name}")
    try:
        config = _read_config(path / CONFIG)
        ranks_and_scales = _ranks_and_scales(config, list(shapes))
        for name, (rank, _) in ranks_and_scales.items():
            if rank > max_rank:
                raise ValueError(f"{name} must have rank <= max_lora_rank {max_rank}, got {rank}")
        tensors = _read_tensors(path / WEIGHTS)
        return _read_matrices(tensors, ranks_and_scales, shapes, dtype)
    except Exception as error:  # of a file's content: the libraries' errors share no base
        raise ValueError(f"cannot read an adapter from {path}: {error}") from error


def _read_matrices(
    tensors: dict[str, torch.Tensor],
    ranks_and_scales: dict[str, tuple[int, float]],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
) -> Adapter:
    matrices = {}
    digest = blake2b(digest_size=16)
    for name, (rank, scale) in sorted(ranks_and_scales.items()):
        num_out, num_in = shapes[name]
        a = _take(tensors, f"{name}.lora_A.weight", (rank, num_in))
        b = _take(tensors, f"{name}.lora_B.weight", (num_out, rank))
        digest.update(f"{name} {scale!r} {a.dtype} {b.dtype} {tuple(a.shape)}\n".encode())
        for tensor in (a, b):
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        a = a.to(dtype)
        scaled = (b.double() * scale).to(dtype)
        if not (a.isfinite().all() and scaled.isfinite().all()):
            raise ValueError(f"{name} must be finite in {dtype}")
        matrices[name] = LowRank(a, scaled)
    if tensors:
        left = ", ".join(sorted(tensors)[:3])
        raise ValueError(
            f"{WEIGHTS} has {len(tensors)} tensors that {CONFIG} does not name: {left}"
        )
    return Adapter(digest.hexdigest(), matrices)


# -- the configuration


def _read_config(path: Path) -> dict[str, Any]:
    config = read_json(path)
    if config.get("peft_type") != "LORA":
        raise ValueError(f"peft_type must be 'LORA', got {config.get('peft_type')!r}")
    for name, reason in _REFUSED.items():
        if config.get(name):
            raise ValueError(f"{name} is not supported ({reason}), got {config[name]!r}")
    if (init_weights := config.get("init_lora_weights", True)) not in _KEEPS_THE_BASE:
        raise ValueError(
            f"init_lora_weights must keep the base model's weights, got {init_weights!r}; "
            "PEFT converts such an adapter when it saves the adapter"
        )
    if config.get("bias", "none") != "none":
        raise ValueError(f"bias must be 'none', got {config['bias']!r}")
    return config


def _targets(config: dict[str, Any], names: Collection[str]) -> Collection[str]:
    """Return the names of the model's matrices that the adapter changes, by PEFT's rules."""
    targets = config.get("target_modules")
    if not isinstance(targets, str | list):
        raise ValueError(f"target_modules must be a str or a list, got {targets!r}")
    for target in [targets] if isinstance(targets, str) else targets:
        end = target.split(".")[-1]
        if end in ("embed_tokens", "lm_head"):
            raise ValueError(f"target_modules must name matrices of layers, got {end!r}")
    found = names if targets == "all-linear" else _matched("target_modules", targets, names)
    excluded = _matched("exclude_modules", config.get("exclude_modules") or [], names)
    return [name for name in found if name not in excluded]


def _matched(field: str, patterns: str | list[str], names: Collection[str]) -> list[str]:
    """Return the names that match: a `str` is a regular expression for the whole name, a list has
    whole names or suffixes of them."""
    if not isinstance(patterns, str):
        return [n for n in names if any(n == end or n.endswith(f".{end}") for end in patterns)]
    expression = regex.compile(patterns)
    end = time.monotonic() + TIMEOUT_S
    found = []
    for name in names:
        left = max(end - time.monotonic(), 1e-6)
        try:
            if expression.fullmatch(name, timeout=left, concurrent=True):
                found.append(name)
        except TimeoutError:
            raise ValueError(
                f"{field} must match the names of the model's matrices within {TIMEOUT_S:g} s, got "
                f"{patterns[:200]!r}"
            ) from None
    return found


def _ranks_and_scales(
    config: dict[str, Any], names: Collection[str]
) -> dict[str, tuple[int, float]]:
    targets = _targets(config, names)
    if not targets:
        raise ValueError("target_modules must match a matrix of this model's layers")
    ranks = _by_pattern(config, "rank_pattern", "r", targets)
    alphas = _by_pattern(config, "alpha_pattern", "lora_alpha", targets)
    return {name: _rank_and_scale(config, name, ranks[name], alphas[name]) for name in targets}


def _rank_and_scale(config: dict[str, Any], name: str, rank: Any, alpha: Any) -> tuple[int, float]:
    if type(rank) is not int or rank < 1:
        raise ValueError(f"the rank of {name} must be an integer >= 1, got {rank!r}")
    if type(alpha) not in (int, float) or not math.isfinite(alpha):
        raise ValueError(f"lora_alpha of {name} must be a number, got {alpha!r}")
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _by_pattern(
    config: dict[str, Any], field: str, default: str, names: Collection[str]
) -> dict[str, Any]:
    """Return the value for each name. The first pattern that matches the end of a name decides."""
    found = dict.fromkeys(names, config.get(default))
    patterns = config.get(field) or {}
    for pattern, value in reversed(patterns.items()):
        for name in _matched(field, rf"(.*\.)?({pattern})", names):
            found[name] = value
    return found


# -- the tensors


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the file's tensors by name, without PEFT's prefix."""
    # Copies, because the file can be overwritten while the adapter is served.
    return {name.removeprefix(_PREFIX): t.clone() for name, t in load_file(path).items()}


def _take(tensors: dict[str, torch.Tensor], name: str, shape: tuple[int, int]) -> torch.Tensor:
    tensor = tensors.pop(name, None)
    if tensor is None:
        raise ValueError(f"{WEIGHTS} lacks {name}, which {CONFIG} names")
    if tuple(tensor.shape) != shape or not tensor.is_floating_point():
        given = f"{tuple(tensor.shape)} of {tensor.dtype}"
        raise ValueError(f"{name} must have shape {shape}, got {given}: it is for another model")
    return tensor
