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
from collections.abc import Mapping
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
_REFUSED = (
    "use_dora",  # DoRA also scales each output
    "lora_bias",  # B has a bias
    "modules_to_save",  # whole modules are replaced
    "trainable_token_indices",  # rows of the embedding are replaced
    "alora_invocation_tokens",  # an activated adapter begins in the middle of a prompt
    "layer_replication",  # the model has other layers
    "target_parameters",  # parameters outside of matrices are changed
    "use_qalora",  # its inputs are grouped
    "use_bdlora",  # its matrices are of diagonal blocks
    "fan_in_fan_out",  # its matrices are transposed
    "megatron_config",  # its matrices are Megatron's
    "arrow_config",  # it chooses among other adapters
    "kasa_config",  # it changes the base model's weights
    "velora_config",  # its inputs are compressed
    "monteclora_config",  # its matrices are drawn
    "rank_pattern",  # its ranks differ between matrices
    "alpha_pattern",  # its scales differ between matrices
    "exclude_modules",  # only some matrices are changed; target_modules can name them
    "layers_to_transform",  # only some layers are changed
    "layers_pattern",  # only some layers are changed
)
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
        targets = _targets(config, list(shapes))
        rank, scale = _rank_and_scale(config)
        if rank > max_rank:
            raise ValueError(f"r must be <= max_lora_rank {max_rank}, got {rank}")
        # Copies, because the file can be overwritten while the adapter is served.
        stored = load_file(path / WEIGHTS).items()
        tensors = {name.removeprefix(_PREFIX): tensor.clone() for name, tensor in stored}
        matrices = {}
        digest = blake2b(f"{scale!r}".encode(), digest_size=16)
        for name in sorted(targets):
            num_out, num_in = shapes[name]
            a = _take(tensors, f"{name}.lora_A.weight", (rank, num_in))
            b = _take(tensors, f"{name}.lora_B.weight", (num_out, rank))
            digest.update(f"{name} {a.dtype} {b.dtype} {tuple(a.shape)}\n".encode())
            for tensor in (a, b):
                digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
            matrices[name] = LowRank(a.to(dtype), (b.double() * scale).to(dtype))
            if not (matrices[name].a.isfinite().all() and matrices[name].b.isfinite().all()):
                raise ValueError(f"{name} must be finite in {dtype}")
        if tensors:
            left = ", ".join(sorted(tensors)[:3])
            raise ValueError(
                f"{WEIGHTS} has {len(tensors)} tensors that {CONFIG} does not name: {left}"
            )
        return Adapter(digest.hexdigest(), matrices)
    except Exception as error:  # of a file's content: the libraries' errors share no base
        raise ValueError(f"cannot read an adapter from {path}: {error}") from error


# -- the configuration


def _read_config(path: Path) -> dict[str, Any]:
    config = read_json(path)
    if config.get("peft_type") != "LORA":
        raise ValueError(f"peft_type must be 'LORA', got {config.get('peft_type')!r}")
    for name in _REFUSED:
        if config.get(name):
            raise ValueError(f"{name} is not supported, got {config[name]!r}")
    if (init_weights := config.get("init_lora_weights", True)) not in _KEEPS_THE_BASE:
        raise ValueError(
            f"init_lora_weights must keep the base model's weights, got {init_weights!r}; "
            "PEFT converts such an adapter when it saves the adapter"
        )
    if config.get("bias", "none") != "none":
        raise ValueError(f"bias must be 'none', got {config['bias']!r}")
    return config


def _targets(config: dict[str, Any], names: list[str]) -> list[str]:
    """Return the names of the model's matrices that the adapter changes, by PEFT's rules: a `str`
    is a regular expression for the whole name, a list has whole names or suffixes of them."""
    targets = config.get("target_modules")
    if not isinstance(targets, str | list):
        raise ValueError(f"target_modules must be a str or a list, got {targets!r}")
    if targets == "all-linear":
        return names
    if isinstance(targets, str):
        found = _matched(targets, names)
    else:
        found = [n for n in names if any(n == end or n.endswith(f".{end}") for end in targets)]
    if not found:
        raise ValueError("target_modules must match a matrix of this model's layers")
    return found


def _matched(pattern: str, names: list[str]) -> list[str]:
    expression = regex.compile(pattern)
    end = time.monotonic() + TIMEOUT_S
    try:
        return [
            name
            for name in names
            if expression.fullmatch(
                name, timeout=max(end - time.monotonic(), 1e-6), concurrent=True
            )
        ]
    except TimeoutError:
        raise ValueError(
            "target_modules must match the names of the model's matrices within "
            f"{TIMEOUT_S:g} s, got {pattern[:200]!r}"
        ) from None


def _rank_and_scale(config: dict[str, Any]) -> tuple[int, float]:
    rank: Any = config.get("r")
    alpha: Any = config.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        raise ValueError(f"r must be an integer >= 1, got {rank!r}")
    if type(alpha) not in (int, float) or not math.isfinite(alpha):
        raise ValueError(f"lora_alpha must be a number, got {alpha!r}")
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


# -- the tensors


def _take(tensors: dict[str, torch.Tensor], name: str, shape: tuple[int, int]) -> torch.Tensor:
    tensor = tensors.pop(name, None)
    if tensor is None:
        raise ValueError(f"{WEIGHTS} lacks {name}, which {CONFIG} names")
    if tuple(tensor.shape) != shape or not tensor.is_floating_point():
        given = f"{tuple(tensor.shape)} of {tensor.dtype}"
        raise ValueError(f"{name} must have shape {shape}, got {given}: it is for another model")
    return tensor
