"""The cost of a block of experts, by rows of a step: few rows read few experts, many read all.

    python -m workshop.bench.experts_bench           measures (minutes), writes the record
    python -m workshop.bench.experts_bench --tables  writes the table of the page

The block is one layer of Qwen3-30B-A3B's sizes with random weights, packed as in the engine. It is
compared with an MLP as large as the experts of one token, and with `transformers`' block on the
same weights. The floor is the bytes of the chosen experts, at the rate at which that MLP reads its
weights for one row. Times are processor time of one thread: other programs count less."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from common.models.blocks import MLPBlock
from common.models.experts.expert_config import qwen3_moe
from common.models.experts.experts_block import ExpertsBlock, stack
from common.models.linear import linear_layers
from common.models.regions.regions import Regions
from workshop.measure.bench.bench_models import choose_dtype
from workshop.measure.bench.bench_record import describe_environment, markdown_table
from workshop.measure.bench.random_weights import QWEN3_0_6B
from workshop.measure.bench.side_by_side import measure_and_tell

RECORD = Path(__file__).parent / "records" / "experts.json"
PAGE = Path(__file__).parents[3] / "common" / "models" / "experts" / "README.md"
SIZES = dict(num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768)
HIDDEN = 2048  # with `SIZES`, https://huggingface.co/Qwen/Qwen3-30B-A3B
NUMBERS = (1, 2, 4, 8, 16, 32, 64, 128)
REGIONS = Regions()


def make_blocks(
    sizes: dict[str, int], hidden: int, dtype: torch.dtype
) -> tuple[ExpertsBlock, MLPBlock, Qwen3MoeSparseMoeBlock]:
    experts = qwen3_moe({**sizes, "num_hidden_layers": 1, "norm_topk_prob": True})
    assert experts is not None
    inner = experts.num_active * experts.intermediate_size
    shape: dict[str, Any] = dict(hidden_size=hidden, intermediate_size=inner, num_hidden_layers=1)
    config = replace(QWEN3_0_6B, **shape, experts=experts)
    block, mlp = ExpertsBlock(config, dtype, "cpu"), MLPBlock(config, dtype, "cpu")
    generator = torch.Generator().manual_seed(0)
    for parameter in (*block.parameters(), *mlp.parameters()):
        parameter.normal_(0.0, 0.02, generator=generator)
    fields: dict[str, Any] = {**sizes, "hidden_size": hidden, "norm_topk_prob": True}
    theirs = Qwen3MoeConfig(**fields)
    with torch.device("meta"):
        twin = Qwen3MoeSparseMoeBlock(theirs)
    weights = {
        "gate.weight": block.router.plain_weight().clone(),
        "experts.gate_up_proj": stack(block.gate_up),
        "experts.down_proj": stack(block.down),
    }
    twin.load_state_dict(weights, strict=True, assign=True)
    for part in (block, mlp):
        for matrix in linear_layers(part):
            matrix.pack()
    return block, mlp, twin.eval()


def num_weights(module: nn.Module) -> int:
    return sum(m.shape.numel() for m in linear_layers(module))


@torch.inference_mode()
def timed(work: Callable[[torch.Tensor], object], inputs: list[torch.Tensor]) -> float:
    """Seconds of a call, with different rows each time: experts are not in a cache already."""
    started = time.process_time()
    for x in inputs:
        work(x)
    return (time.process_time() - started) / len(inputs)


def measure(rounds: int, sizes: dict[str, int] = SIZES, hidden: int = HIDDEN) -> dict:
    dtype, threads_before = choose_dtype("auto"), torch.get_num_threads()
    torch.set_num_threads(1)
    block, mlp, twin = make_blocks(sizes, hidden, dtype)
    ways: dict[str, Callable[[torch.Tensor], object]] = {
        "experts": lambda x: block.add_to(torch.zeros_like(x), x, REGIONS),
        "mlp": lambda x: mlp.add_to(torch.zeros_like(x), x, REGIONS),
        "transformers": lambda x: twin(x[None]),
    }
    found: dict[str, dict[str, list[float]]] = {
        str(n): {name: [] for name in (*ways, "num_read")} for n in NUMBERS
    }
    for number in range(1 + rounds):
        for n in NUMBERS:
            generator = torch.Generator().manual_seed(1000 * number + n)
            rows = (torch.randn(n, hidden, generator=generator) for _ in range(4))
            inputs = [x.to(dtype) for x in rows]
            seconds = {name: timed(work, inputs) for name, work in ways.items()}
            if number:  # the first one warms up
                with torch.inference_mode():
                    read = [len(block.route(x)[1].unique()) for x in inputs]
                found[str(n)]["num_read"].append(statistics.mean(read))
                for name, own in seconds.items():
                    found[str(n)][name].append(round(own, 7))
    torch.set_num_threads(threads_before)
    per_expert = (num_weights(block) - block.router.shape.numel()) // block.experts.num_experts
    return {
        "command": "python -m workshop.bench.experts_bench",
        "environment": describe_environment(),
        "config": {
            **sizes,
            "hidden_size": hidden,
            "dtype": str(dtype).removeprefix("torch."),
            "bytes_per_expert": per_expert * dtype.itemsize,
            "bytes_of_mlp": num_weights(mlp) * dtype.itemsize,
            "clock": "time.process_time",
            "threads": 1,
            "rounds": rounds,
        },
        "found": found,
    }


def table_of(record: dict) -> str:
    config, found = record["config"], record["found"]

    def ms(n: str, name: str) -> float:
        return 1e3 * statistics.median(found[n][name])

    rate = config["bytes_of_mlp"] / ms("1", "mlp")  # bytes in a millisecond
    lines = []
    for n in found:
        num_read = statistics.median(found[n]["num_read"])
        floor = num_read * config["bytes_per_expert"] / rate
        cells = [n, f"{num_read:.0f}", f"{floor:.1f}"]
        lines.append(
            [*cells, *(f"{ms(n, name):.1f}" for name in ("experts", "mlp", "transformers"))]
        )
    head = ["rows", f"experts read, of {config['num_experts']}", "floor, ms", "this block, ms"]
    head += ["an MLP of a token's size, ms", "`transformers`, ms"]
    return markdown_table(head, lines)


def main() -> None:
    measure_and_tell(__doc__, RECORD, PAGE, "experts", measure, table_of, rounds=3)


if __name__ == "__main__":
    main()
