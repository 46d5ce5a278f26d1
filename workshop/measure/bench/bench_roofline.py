"""The measured limits of this machine: the floor under a decode step.

A decode step reads every weight once and every cached key and value once, so it cannot take less
than `bytes / bandwidth`. The bandwidth is that of a large matrix-vector product, which only reads,
as a decode step does. With many rows the multiplications take longer than the reading; `linear_ms`
times all of the model's own matrices with 1 row, with 8, and with as many as there are requests.

A model whose weights fit in the processor's last cache is not bound by memory at all: then
`linear_ms` with 1 row is below the "floor".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from common.assembly.assembly import packing_of
from common.engine_config import EngineConfig
from common.models.linear import Linear, OneDnnProduct, linear_layers
from common.models.loader import LoadedModel
from common.models.regions.compiled_linear import CompiledProduct
from workshop.measure.rounds import time_in_turn

_MIB = 1 << 20


def num_weight_bytes(matrix: Linear, dtype: torch.dtype) -> int:
    """The bytes that a product reads."""
    if isinstance(matrix.packed, OneDnnProduct):
        return torch.ops.mkldnn._nbytes(matrix.packed.packed)
    if isinstance(matrix.packed, CompiledProduct):
        return matrix.packed.packed.nbytes
    return matrix.shape.numel() * dtype.itemsize


@torch.inference_mode()
def measure_bandwidth(mebibytes: int, repeats: int) -> dict[str, Any]:
    """Return gigabytes (1e9) a second."""
    num_columns = 4096
    matrix = torch.ones(mebibytes * _MIB // (4 * num_columns), num_columns)
    vector = torch.ones(num_columns)
    times = time_in_turn({"matvec": lambda: torch.mv(matrix, vector)}, repeats)["matvec"]
    speeds = [round(matrix.nbytes / ms / 1e6, 2) for ms in times]
    return {"mebibytes": mebibytes, "matvec_gb_per_s": speeds}


@torch.inference_mode()
def measure_linear(loaded: LoadedModel, row_counts: list[int], repeats: int) -> dict[str, Any]:
    """Milliseconds to multiply all matrices of the model with each number of rows. They
    are packed as in the engine where that is possible."""
    model = loaded.model
    if (packing := packing_of(EngineConfig(), model)) is not None:
        model.pack_weights(packing)
    matrices = list(linear_layers(model))
    dtype = model.embed_weight.dtype
    sizes = [num_weight_bytes(matrix, dtype) for matrix in matrices]

    def multiply(rows: int) -> Callable[[], None]:
        inputs = [torch.ones(rows, matrix.shape[1], dtype=dtype) for matrix in matrices]

        def call() -> None:
            for matrix, hidden in zip(matrices, inputs):
                matrix(hidden)

        return call

    calls = {str(rows): multiply(rows) for rows in row_counts}
    return {"weight_bytes": sum(sizes), "linear_ms": time_in_turn(calls, repeats)}


def kv_bytes_per_token(loaded: LoadedModel) -> int:
    config = loaded.config
    itemsize = loaded.model.embed_weight.dtype.itemsize
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * itemsize
