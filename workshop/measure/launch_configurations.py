"""Every Triton kernel launch that an engine can make, from its configuration alone.

A backend launches only what `attention_launch` and similar functions return, so their results for
the shapes of a model are all kernels that are ever compiled. They are few: for example, two tile
sizes of one attention kernel. They can be compiled for a GPU that this machine does not have
(`resources.py`).

    kernel                       once for each
    attention                    tile size, model
    merging of splits            model
    between matrices, 3 kernels  model
    rejection, matching          where drafts come with probabilities, where they come without

See common/models/regions/README.md#the-gate"""

from __future__ import annotations

from collections.abc import Collection

import torch

from common.engine_config import EngineConfig
from common.models.layer_groups import Window
from common.models.model_config import ModelConfig
from kernel_launch import DEFAULT_ARCHITECTURE, AttentionShape, Launch
from paged_attention_triton import attention_launch, merge_launch


def launch_configurations(
    model: ModelConfig,
    engine: EngineConfig,
    dtype: torch.dtype,
    architecture: int = DEFAULT_ARCHITECTURE,
    draft: ModelConfig | None = None,
    is_interpreted: bool = False,
    vocab_size: int | None = None,  # None: the model's; an engine leaves out ids without a token
    windows: Collection[Window] = (None,),  # of the model's groups of layers
) -> list[Launch]:
    """Return all launches of a model loaded in `dtype`. In float64, only the verification rules
    are Triton kernels."""
    launches: list[Launch] = []
    if dtype != torch.float64:
        for config in (model,) if draft is None else (model, draft):
            shape = attention_shape(config, engine, dtype, architecture, is_interpreted)
            for window in {window or 0 for window in windows}:
                windowed = shape._replace(window=window)
                for is_short in (True, False):
                    launches.append(attention_launch(windowed, is_short))
            launches.append(merge_launch(config.head_dim, dtype))
            launches += layer_launches(config, shape)
    if engine.speculation is not None:
        launches += verification_launches(vocab_size or model.vocab_size, engine, dtype)
    return launches


def attention_shape(
    model: ModelConfig,
    engine: EngineConfig,
    dtype: torch.dtype,
    architecture: int,
    is_interpreted: bool,
) -> AttentionShape:
    """Return the shape of the attention launches. Queries have a separate tensor, as written by
    `rotate_and_write`. The slots of a block are consecutive, as in `PagedKVCache`."""
    num_kv_heads = model.num_key_value_heads
    head_dim = model.head_dim
    block_size = engine.block_size
    slot_stride = num_kv_heads * head_dim
    return AttentionShape(
        num_heads=model.num_attention_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        cache_strides=(block_size * slot_stride, slot_stride, head_dim),
        dtype=dtype,
        is_interpreted=is_interpreted,
        architecture=architecture,
    )


def layer_launches(model: ModelConfig, shape: AttentionShape) -> list[Launch]:
    """Return the launches of `kernel_regions.py`."""
    from common.models.regions.kernel_regions import (
        add_rms_norm_launch,
        rotate_and_write_launch,
        silu_and_multiply_launch,
    )

    norm_dtype = model.norm_dtype(shape.dtype)
    sizes = sorted(model.mlp_sizes) if model.activation == "silu" else []
    rotate = rotate_and_write_launch(shape, norm_dtype if model.has_qk_norm else None)
    return [
        add_rms_norm_launch(model.hidden_size, shape.dtype, norm_dtype),
        rotate,
        *(silu_and_multiply_launch(size, shape.dtype) for size in sizes),
    ]


def verification_launches(
    vocab_size: int, engine: EngineConfig, dtype: torch.dtype
) -> list[Launch]:
    """Return the launches that verify drafts. Drafts from a look-up have no probabilities; drafts
    from a draft model have them for requests that sample."""
    from rejection_sampler_triton import matching_launch, rejection_launch

    num_drafts = engine.num_rows_per_request - 1
    launches = [matching_launch(num_drafts)]
    if engine.speculation is not None and engine.speculation.method == "draft":
        single = dtype if dtype == torch.float64 else torch.float32
        launches.append(rejection_launch(vocab_size, num_drafts, single))
    return launches
