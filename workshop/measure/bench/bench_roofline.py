"""The measured limits of this machine: the floor under a decode step.

A decode step reads every weight once and every cached key and value once, so it cannot take less
than `bytes / bandwidth`. Two bandwidths are measured: of a large copy, which reads and writes, and
of a large matrix-vector product, which only reads and is closer to a decode step. With many rows
the multiplications take longer than the reading; `linear_ms` times all of the model's own matrices
with as many rows as there are requests.

A model whose weights fit in the processor's last cache is not bound by memory at all: then
`linear_ms` with 1 row is below the "floor".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from common.assembly.assembly import packing_of
from common.engine_config import EngineConfig
from common.models.linear import Linear, OneDnnProduct, linear_layers
from common.models.loader import LoadedModel
from common.models.regions.compiled_linear import CompiledProduct
from workshop.measure.rounds import time_in_turn

_MIB = 1 << 20


@torch.inference_mode()
def num_weight_bytes(matrix: Linear, dtype: torch.dtype) -> int:
    """The bytes that a product reads."""
    if isinstance(matrix.packed, OneDnnProduct):
        return torch.ops.mkldnn._nbytes(matrix.packed.packed)
    if isinstance(matrix.packed, CompiledProduct):
        return matrix.packed.packed.nbytes
    return matrix.shape.numel() * dtype.itemsize


def measure_bandwidth(mebibytes: int, repeats: int) -> dict[str, Any]:
    """Return gigabytes (1e9) a second. A copy counts the bytes it reads and the bytes it writes."""
    num_columns = 4096
    num_rows = mebibytes * _MIB // (4 * num_columns)
    source, target = torch.ones(num_rows, num_columns), torch.zeros(num_rows, num_columns)
    vector = torch.ones(num_columns)
    calls = {"copy": lambda: target.copy_(source), "matvec": lambda: torch.mv(source, vector)}
    num_bytes = {"copy": 2 * source.nbytes, "matvec": source.nbytes}
    milliseconds = time_in_turn(calls, repeats)
    speeds = {
        f"{name}_gb_per_s": [round(num_bytes[name] / ms / 1e6, 2) for ms in times]
        for name, times in milliseconds.items()
    }
    return {"mebibytes": mebibytes} | speeds


@torch.inference_mode()
def measure_linear(
    loaded: LoadedModel, row_counts: list[int], num_prefill_rows: int, repeats: int
) -> dict[str, Any]:
    """Milliseconds to multiply all matrices of the model, in order, with each number of rows. They
    are packed as in the engine where that is possible. `prefill` times those of the layers alone,
    with `num_prefill_rows` rows and fewer repeats."""
    model = loaded.model
    if (packing := packing_of(EngineConfig(), model)) is not None:
        model.pack_weights(packing)
    of_layers = [
        (matrix, matrix.shape[1]) for layer in model.layers for matrix in linear_layers(layer)
    ]
    matrices = [*of_layers, (model.lm_head, loaded.config.hidden_size)]
    dtype = model.embed_weight.dtype
    sizes = [num_weight_bytes(matrix, dtype) for matrix, _ in matrices]

    def multiply(rows: int, matrices: Sequence[tuple[Linear, int]]) -> Callable[[], None]:
        inputs = {width: torch.ones(rows, width, dtype=dtype) for _, width in matrices}

        def call() -> None:
            for matrix, width in matrices:
                matrix(inputs[width])

        return call

    calls = {str(rows): multiply(rows, matrices) for rows in dict.fromkeys(row_counts)}
    prefill = {"ms": multiply(num_prefill_rows, of_layers)}
    return {
        "weight_bytes": sum(sizes),
        "linear_ms": time_in_turn(calls, repeats),
        "prefill": {"num_rows": num_prefill_rows, **time_in_turn(prefill, repeats // 2 + 1)},
    }


def row_counts_up_to(most: int) -> list[int]:
    """Return 1, 2, 4, 8, 16 and from there steps of 8, up to `most`."""
    few = [rows for rows in (1, 2, 4, 8) if rows < most]
    return [*few, *range(16, most, 8), most]


def kv_bytes_per_token(loaded: LoadedModel) -> int:
    config = loaded.config
    itemsize = loaded.model.embed_weight.dtype.itemsize
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * itemsize
