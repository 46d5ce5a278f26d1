"""Every Triton kernel launch that an engine can make, from its configuration alone.

A backend launches only what `attention_launch` and similar functions return, so their results for
the shapes of a model are all kernels that are ever compiled. They are few: for example, two tile
sizes of one attention kernel. They can be compiled for a GPU that this machine does not have
(`resources.py`).

    kernel                       once for each
    attention, merging of splits tile size, model
    between matrices, 3 kernels  model
    rejection, matching          where drafts come with probabilities, where they come without

See common/models/regions/README.md#the-gate"""

from __future__ import annotations

from collections.abc import Collection

import torch

from common.engine_config import EngineConfig
from common.models.layer_groups import Window
from common.models.model_config import ModelConfig
from common.models.regions.kernel_regions import (
    add_rms_norm_launch,
    rotate_and_write_launch,
    silu_and_multiply_launch,
)
from kernel_launch import AttentionShape, Launch
from paged_attention_triton import attention_launch, merge_launch
from rejection_sampler_triton import matching_launch, rejection_launch


def launch_configurations(
    model: ModelConfig,
    engine: EngineConfig,
    shape: AttentionShape,
    windows: Collection[Window] = (None,),  # of the model's groups of layers
) -> list[Launch]:
    """Return all launches of a model with attention of this `shape`. Drafts from a look-up have no
    probabilities; drafts from a draft model have them for requests that sample."""
    launches = layer_launches(model, shape)
    launches.append(merge_launch(shape.head_dim, shape.dtype))
    for window in {window or 0 for window in windows}:
        windowed = shape._replace(window=window)
        for is_short in (True, False):
            launches.append(attention_launch(windowed, is_short))
    if engine.speculation is not None:
        num_drafts = engine.num_rows_per_request - 1
        launches.append(matching_launch(num_drafts))
        if engine.speculation.method == "draft":
            launches.append(rejection_launch(model.vocab_size, num_drafts, torch.float32))
    return launches


def attention_shape(model: ModelConfig, engine: EngineConfig, dtype: torch.dtype) -> AttentionShape:
    """Return the shape of the attention launches. Queries have a separate tensor, as written by
    `rotate_and_write`. The slots of a block are consecutive, as in `PagedKVCache`."""
    head_dim = model.head_dim
    slot_stride = model.num_key_value_heads * head_dim
    return AttentionShape(
        num_heads=model.num_attention_heads,
        num_kv_heads=model.num_key_value_heads,
        head_dim=head_dim,
        block_size=engine.block_size,
        cache_strides=(engine.block_size * slot_stride, slot_stride, head_dim),
        dtype=dtype,
    )


def layer_launches(model: ModelConfig, shape: AttentionShape) -> list[Launch]:
    """Return the launches of `kernel_regions.py`."""
    norm_dtype = model.norm_dtype(shape.dtype)
    sizes = sorted(model.mlp_sizes) if model.activation == "silu" else []
    rotate = rotate_and_write_launch(shape, norm_dtype if model.has_qk_norm else None)
    return [
        add_rms_norm_launch(model.hidden_size, shape.dtype, norm_dtype),
        rotate,
        *(silu_and_multiply_launch(size, shape.dtype) for size in sizes),
    ]
