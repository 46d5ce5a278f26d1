"""A block of experts: few rows read few experts, many read all. `features.py` runs this workload.

The block is one layer with random weights, packed as in the engine. It is compared with an MLP as
large as the experts of one token, and with `transformers`' block on the same weights. The floor is
the bytes of the chosen experts, at the rate at which that MLP reads its weights for one row."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from common.models.blocks import MLPBlock
from common.models.experts.expert_config import qwen3_moe
from common.models.experts.experts_block import ExpertsBlock, stack
from common.models.linear import linear_layers
from common.models.regions.regions import Regions
from workshop.measure.bench.bench_record import markdown_table
from workshop.measure.bench.random_weights import QWEN3_0_6B
from workshop.measure.rounds import Case

REGIONS = Regions()
SIZES = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
Rows = list[torch.Tensor]


def make_blocks(config: dict[str, Any]) -> tuple[ExpertsBlock, MLPBlock, nn.Module]:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    dtype, hidden = getattr(torch, config["dtype"]), config["hidden_size"]
    sizes = {name: config[name] for name in SIZES}
    experts = qwen3_moe({**sizes, "num_hidden_layers": 1, "norm_topk_prob": True})
    assert experts is not None
    inner = experts.num_active * experts.intermediate_size
    shape: dict[str, Any] = dict(hidden_size=hidden, intermediate_size=inner, num_hidden_layers=1)
    layer = replace(QWEN3_0_6B, **shape, experts=experts)
    block, mlp = ExpertsBlock(layer, dtype, "cpu"), MLPBlock(layer, dtype, "cpu")
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


def draw_rows(num_rows: int, config: dict[str, Any]) -> Iterator[Rows]:
    """Draw other rows for each run, so that experts are not in a cache already, but the same for
    every setting."""
    generator = torch.Generator().manual_seed(num_rows)
    dtype, hidden = getattr(torch, config["dtype"]), config["hidden_size"]
    while True:
        yield [torch.randn(num_rows, hidden, generator=generator).to(dtype) for _ in range(4)]


@torch.inference_mode()
def time_call(call: Callable[[torch.Tensor], object], inputs: Iterator[Rows]) -> float:
    """Return the seconds of one call."""
    rows = next(inputs)
    start = time.process_time()
    for x in rows:
        call(x)
    return round((time.process_time() - start) / len(rows), 7)


@torch.inference_mode()
def count_experts(block: ExpertsBlock, inputs: Iterator[Rows]) -> float:
    return statistics.mean(len(block.route(x)[1].unique()) for x in next(inputs))


def cases(config: dict[str, Any]) -> Iterator[Case]:
    block, mlp, twin = make_blocks(config)
    calls: dict[str, Callable[[torch.Tensor], object]] = {
        "experts": lambda x: block.add_to(torch.zeros_like(x), x, REGIONS),
        "mlp": lambda x: mlp.add_to(torch.zeros_like(x), x, REGIONS),
        "transformers": lambda x: twin(x[None]),
    }
    for n in config["num_rows"]:
        settings = {
            name: partial(time_call, call, draw_rows(n, config)) for name, call in calls.items()
        }
        settings["num_read"] = partial(count_experts, block, draw_rows(n, config))
        yield Case("rows", f"{n}", settings)


def tables(record: dict[str, Any]) -> list[str]:
    config, found = record["config"], record["runs"]["rows"]
    medians = {n: {k: statistics.median(runs) for k, runs in f.items()} for n, f in found.items()}
    ms_per_expert = 1e3 * medians["1"]["mlp"] / config["num_experts_per_tok"]
    rows = []
    for n, median in medians.items():
        floor = median["num_read"] * ms_per_expert
        ms = [1e3 * median[name] for name in ("experts", "mlp", "transformers")]
        rows.append([n, f"{median['num_read']:.0f}", *(f"{one:.1f}" for one in (floor, *ms))])
    head = ["rows", f"experts read, of {config['num_experts']}", "floor, ms", "this block, ms"]
    head += ["an MLP of a token's size, ms", "`transformers`, ms"]
    return [markdown_table(head, rows)]
