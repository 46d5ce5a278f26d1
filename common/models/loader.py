"""Load a complete model from a directory or a hub id.

    resolve_checkpoint    name -> directory, downloaded if need be
    load_model            directory -> LoadedModel

Loading has one rule: every tensor of the checkpoint is used exactly once, and every parameter is
filled exactly once. A surplus or missing tensor is an error that names it, because a model with a
few unfilled weights still answers, in gibberish. There are two exceptions, as in `transformers`.
`rotary_emb.inv_freq` of old checkpoints, which follows from the configuration, is skipped. With
`tie_word_embeddings` the shared matrix may have either of its names, or both if both hold the same
values. (If they differ, transformers 5 unties them and warns; here it is an error.)

Parameters are allocated once, uninitialised, on their final device. Files are mapped into memory
and copied tensor by tensor. If the matrices are to be packed (`linear.py`), those of a layer are
packed, and their plain copies freed, before the next layer is read. If several processes share a
model, each copies its own slices and checks names and shapes of the whole.

See common/README.md#which-models"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from common.models.blocks import CheckpointTensor
from common.models.linear import Packing, linear_layers
from common.models.model import DecoderModel
from common.models.model_config import ModelConfig, token_ids
from common.models.processor import is_bfloat16_fast

logger = logging.getLogger(__name__)

_FILE_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _FILE_DTYPES.values()}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"  # one, if they are tied
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DOWNLOADS = ["*.json", "model*.safetensors", "tokenizer*", "merges.txt", "*.jinja"]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded model. `generation_eos_token_ids`: ids that end a text, from `config.json` and
    `generation_config.json`; an engine adds its tokenizer's EOS. `path` is None without a file."""

    model: DecoderModel
    config: ModelConfig
    generation_eos_token_ids: tuple[int, ...] = ()
    path: Path | None = None


def resolve_checkpoint(model: str | Path) -> Path:
    """Return a model's directory: `model` itself, or the hub's download of it. Raises
    `FileNotFoundError` if `model` is neither."""
    path = Path(model).expanduser()
    if not path.exists():
        path = _download(model)
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"{path} must be a model directory, but has no config.json")
    return path


def _download(model: str | Path) -> Path:
    if isinstance(model, Path):
        raise FileNotFoundError(f"model must be a directory or a hub id, got {model}")
    from huggingface_hub import snapshot_download  # imported late: slow, and rarely needed

    try:
        return Path(snapshot_download(model, allow_patterns=_DOWNLOADS))
    except Exception as error:  # the hub's, the network's and the cache's errors share no base
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise FileNotFoundError(
            f"model must be a directory or a hub id to download, got {model}: {reason}"
        ) from error


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint's metadata, before the weights are read."""

    path: Path
    config: ModelConfig
    generation_eos_token_ids: tuple[int, ...]


def read_checkpoint(model: str | Path) -> Checkpoint:
    """Read a checkpoint's metadata. Raises `FileNotFoundError` and `ValueError` like
    `load_model`."""
    path = resolve_checkpoint(model)
    config = ModelConfig.from_hf(read_json(path / "config.json"))
    return Checkpoint(path, config, _eos_token_ids(path, config))


def load_model(
    model: str | Path | Checkpoint,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    make: Callable[[ModelConfig, torch.dtype, torch.device], DecoderModel] = DecoderModel,
    packing_of: Callable[[DecoderModel], Packing | None] = lambda model: None,
) -> LoadedModel:
    """Load a complete model, ready for `forward`. `dtype="auto"` is the checkpoint's dtype, or
    float32 on a CPU without fast arithmetic for it. `make` can leave a part of the model to other
    processes (`common/parallel`); only the part it takes is read. `packing_of` returns how the
    matrices are packed while they are read; None: not packed. Raises `FileNotFoundError` for
    missing files and `ValueError` for tensors that do not fit, before weights are
    read (except for a tied matrix that is stored twice and differs)."""
    checkpoint = model if isinstance(model, Checkpoint) else read_checkpoint(model)
    path = checkpoint.path
    config = checkpoint.config
    device = torch.device(device)
    tensors = _open_tensors(path)
    if config.tie_word_embeddings and EMBEDDING not in tensors and HEAD in tensors:
        tensors[EMBEDDING] = tensors.pop(HEAD)
    dtype = _resolve_dtype(dtype, config, tensors, device)
    decoder = make(config, dtype, device)
    parts = decoder.checkpoint_tensors()
    _check_tensors(parts, tensors)
    _fill(decoder, parts, tensors, packing_of(decoder))
    return LoadedModel(decoder, config, checkpoint.generation_eos_token_ids, path)


# -- files


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # not UTF-8, not JSON
        raise ValueError(f"cannot read {path} as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return value


def _open_tensors(path: Path) -> dict[str, Any]:
    """Open safetensors files. Returns the tensors by name, as slices of mapped files; reads no
    weights yet."""
    if (path / _WEIGHTS).is_file():
        file_names = [_WEIGHTS]
    elif (path / _INDEX).is_file():
        file_names = sorted(set(read_json(path / _INDEX)["weight_map"].values()))
    else:
        raise FileNotFoundError(
            f"{path} has no weights: neither {_WEIGHTS} nor {_INDEX}; no other file is read, "
            "because reading a pickled one may run any code"
        )
    files = [_open_file(path, file_name) for file_name in file_names]
    found = {name: file.get_slice(name) for file in files for name in sorted(file.keys())}
    if len(found) < sum(len(list(file.keys())) for file in files):
        raise ValueError(f"{path} has a tensor in two files")
    return found


def _open_file(path: Path, file_name: str) -> Any:
    try:
        return safe_open(path / file_name, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path / file_name} is corrupt or incomplete: {error}") from error


def _eos_token_ids(path: Path, config: ModelConfig) -> tuple[int, ...]:
    """All EOS ids that either file lists. Some models have several; the files rarely agree."""
    generation: tuple[int, ...] = ()
    if (path / "generation_config.json").is_file():
        value = read_json(path / "generation_config.json").get("eos_token_id")
        generation = token_ids("generation_config.json: eos_token_id", value)
    ids = dict.fromkeys(generation + config.eos_token_ids)
    return tuple(i for i in ids if 0 <= i < config.vocab_size)


# -- tensors


def _resolve_dtype(
    dtype: str | torch.dtype, config: ModelConfig, tensors: dict[str, Any], device: torch.device
) -> torch.dtype:
    if dtype != "auto":
        requested = _DTYPES.get(str(dtype).removeprefix("torch."))
        if requested is None:
            raise ValueError(f"dtype must be 'auto' or one of {', '.join(_DTYPES)}, got {dtype!r}")
        return requested
    stored = _DTYPES.get(config.dtype or "")
    if stored is None:  # the configuration does not say
        first = next(iter(tensors.values()))
        stored = _FILE_DTYPES.get(first.get_dtype(), torch.float32)
    is_fast = {
        torch.bfloat16: is_bfloat16_fast,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    if device.type != "cpu" or stored not in is_fast or is_fast[stored]():
        return stored
    logger.info("dtype: float32, because this CPU multiplies %s slowly", stored)
    return torch.float32


def _check_tensors(parts: dict[str, CheckpointTensor], tensors: dict[str, Any]) -> None:
    """Raise `ValueError` unless all names, shapes and dtypes fit. Reads no weights."""
    names = {name for name in tensors if not name.endswith("rotary_emb.inv_freq")}
    if HEAD not in parts:  # they are tied, and may be stored twice
        names.discard(HEAD)
    if missing := sorted(parts.keys() - names):
        shown = ", ".join(missing[:8])
        raise ValueError(
            f"the checkpoint lacks {len(missing)} tensors that the model needs: {shown}"
        )
    if unused := sorted(names - parts.keys()):
        shown = ", ".join(unused[:8])
        raise ValueError(f"the checkpoint has {len(unused)} tensors that the model lacks: {shown}")
    for name, part in parts.items():
        shape = tuple(tensors[name].get_shape())
        dtype = tensors[name].get_dtype()
        if shape != part.shape:
            sides = f"{shape} in the checkpoint and {part.shape} by config.json"
            raise ValueError(f"{name} must have one shape, got {sides}")
        if dtype not in _FILE_DTYPES:
            raise ValueError(f"{name} must have dtype {', '.join(_FILE_DTYPES)}, got {dtype}")


def _fill(
    decoder: DecoderModel,
    parts: dict[str, CheckpointTensor],
    tensors: dict[str, Any],
    packing: Packing | None,
) -> None:
    """Copy every tensor to its place. With `packing`, pack the matrices of a layer when it is
    complete; the tensors of one follow each other in `checkpoint_tensors`."""
    num_filled = 0
    for layer, names in groupby(parts, _layer_of):
        for name in names:
            part = parts[name]
            if (target := part.target) is not None:
                target.copy_(tensors[name][part.part])
                if name.endswith("norm.weight"):
                    target.add_(decoder.config.norm_offset)
                num_filled += target.numel()
                if name == EMBEDDING and HEAD in tensors and HEAD not in parts:
                    _check_tied(target, tensors[HEAD][part.part])
        if packing is not None and layer in decoder.layer_range:
            for matrix in linear_layers(decoder.layers[layer - decoder.layer_range.start]):
                matrix.pack(packing)
    assert num_filled == decoder.num_parameters, "a parameter got no tensor"
    if packing is not None:  # those outside of layers
        decoder.pack_weights(packing)


def _layer_of(name: str) -> int:
    """Return the layer of a tensor, -1: outside of layers."""
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return -1 if found is None else int(found[1])


def _check_tied(embedding: torch.Tensor, head: torch.Tensor) -> None:
    """Check that a tied matrix stored twice has equal values. Each process compares its part."""
    if not torch.equal(embedding, head.to(embedding)):
        raise ValueError(
            f"tie_word_embeddings must be false if {EMBEDDING} and {HEAD} differ in the "
            "checkpoint, got true"
        )
