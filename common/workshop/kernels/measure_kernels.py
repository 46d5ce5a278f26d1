"""What each kernel of a CPU step gains: `python -m common.workshop.kernels.measure_kernels`.

    --threads N     2 by default; with 1, times are processor time, else the wall's
    --table         only print the record that is there

Each is timed plain and fast, in turn, at the shapes of Qwen3-0.6B and at several numbers of tokens.
SiLU is among them to show why it is not compiled in the engine. The record is in `records/`."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from common.kernels.compiled_regions import compile_regions
from common.kernels.regions import Regions
from common.rotary import rotary_factors
from common.workshop.bench.bench_models import choose_dtype
from common.workshop.bench.bench_record import (
    describe_environment,
    read_record,
    table_of,
    write_record,
)
from common.workshop.bench.random_weights import QWEN3_0_6B, random_model
from paged_attention import by_kv_head, repeat_for
from tiled_attention import attend_in_tiles

RECORD = Path(__file__).parent / "records" / "kernels.json"
NUM_TOKENS = (2, 32, 256, 2048)
SEQ_LENS = (32, 128, 256, 1024)
Pair = tuple[Callable[[], Any], Callable[[], Any]]  # plain, fast


def silu_times(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up) if not torch.compiler.is_compiling() else F.silu(gate) * up


def time_pair(pair: Pair, repeats: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Microseconds, all repeats, each round beginning with the other."""
    calls = dict(zip(("plain", "fast"), pair, strict=True))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for r in range(repeats):
        for name in list(calls)[:: 1 if r % 2 == 0 else -1]:
            start = clock()
            calls[name]()
            times[name].append(round(1e6 * (clock() - start), 1))
    return times


@torch.inference_mode()
def region_pairs(num_tokens: int, dtype: torch.dtype, fast: Regions, silu: Callable) -> dict:
    config, plain, generator = QWEN3_0_6B, Regions(), torch.Generator().manual_seed(0)
    heads = config.num_attention_heads + 2 * config.num_key_value_heads

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(num_tokens, *shape, generator=generator).to(dtype)

    hidden, gate_up = random(config.hidden_size), random(2 * config.intermediate_size)
    qkv, table = random(heads, config.head_dim), torch.randn(4096, config.head_dim).to(dtype)
    qk = qkv[:, : heads - config.num_key_value_heads]
    rotary = rotary_factors(table, torch.arange(num_tokens))
    eps, weight = config.rms_norm_eps, torch.ones(config.hidden_size, dtype=dtype)
    by_head = torch.ones(qk.shape[1:], dtype=dtype)
    return {
        "rms_norm": tuple(lambda r=r: r.rms_norm(hidden, weight, eps) for r in (plain, fast)),
        "norm_and_rotate": tuple(
            lambda r=r: r.norm_and_rotate(qk, by_head, eps, rotary) for r in (plain, fast)
        ),
        "silu": (lambda: silu_times(gate_up), lambda: silu(gate_up)),
    }


def attention_pair(seq_len: int, dtype: torch.dtype) -> Pair:
    """A prompt: chapter 2's way and by tiles."""
    config, scale = QWEN3_0_6B, QWEN3_0_6B.head_dim**-0.5
    query = torch.randn(seq_len, config.num_attention_heads, config.head_dim).to(dtype)
    keys, values = torch.randn(2, seq_len, config.num_key_value_heads, config.head_dim).to(dtype)
    rows = by_kv_head(query, config.num_key_value_heads)
    wide_keys, wide_values = (repeat_for(rows, t) for t in (keys, values))
    return (
        lambda: F.scaled_dot_product_attention(
            rows, wide_keys, wide_values, is_causal=True, scale=scale
        ),
        lambda: attend_in_tiles(rows, keys, values, scale),
    )


@torch.inference_mode()
def measure(threads: int, repeats: int, sizes: Sequence[int], seq_lens: Sequence[int]) -> dict:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    dtype = choose_dtype("auto")
    clock = time.process_time if threads == 1 else time.perf_counter
    one_layer = replace(QWEN3_0_6B, num_hidden_layers=1, vocab_size=64)
    model = random_model(one_layer, dtype=dtype).model
    fast = compile_regions(model, from_tokens=(2, 2))
    silu = torch.compile(silu_times, dynamic=True, fullgraph=True)
    cells = []
    for num_tokens in sizes:
        for name, pair in region_pairs(num_tokens, dtype, fast, silu).items():
            cells.append(
                {"kernel": name, "tokens": num_tokens, "us": time_pair(pair, repeats, clock)}
            )
    for seq_len in seq_lens:
        times = time_pair(attention_pair(seq_len, dtype), max(repeats // 4, 3), clock)
        cells.append({"kernel": "attention of a prompt", "tokens": seq_len, "us": times})
    config = {
        "dtype": str(dtype).removeprefix("torch."), "threads": threads, "repeats": repeats,
        "clock": "processor time" if threads == 1 else "wall",
    }  # fmt: skip
    return {"config": config, "cells": cells}


def table(record: dict[str, Any]) -> str:
    rows = []
    for cell in record["cells"]:
        plain, fast = (statistics.median(cell["us"][name]) for name in ("plain", "fast"))
        rows.append(
            {
                "kernel": cell["kernel"], "tokens": f"{cell['tokens']:,}",
                "plain": f"{plain:,.0f} us", "fast": f"{fast:,.0f} us",
                "times as fast": f"{plain / fast:.2f}",
            }
        )  # fmt: skip
    return table_of(rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--table", action="store_true", help="only print the table")
    parser.add_argument("--record", type=Path, default=RECORD, help="where the record is")
    args = parser.parse_args(argv)
    if not args.table:
        environment = describe_environment()
        measured = measure(args.threads, args.repeats, NUM_TOKENS, SEQ_LENS)
        command = f"python -m common.workshop.kernels.measure_kernels --threads {args.threads}"
        write_record(args.record, {"command": command, "environment": environment, **measured})
    print(table(read_record(args.record)))


if __name__ == "__main__":
    main()
