"""The sampler's kernels, for the GPU report: every bit has to be that of the PyTorch version.

penalties     repetition, presence and frequency
temperature   the whole vocabulary: what the workload of the report asks for
top-k         the highest 50, with temperature and min-p, in their order of id
top-p         of the whole vocabulary; PyTorch's softmax in it
draw          one token of each row
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from common.kernels.sampler_kernel import KERNELS
from common.sampling.distributions import IN_TORCH, Rules
from common.workshop.bench.gpu_arithmetic import Cost, sampling_cost
from common.workshop.bench.gpu_inputs import Cell, Lab
from common.workshop.bench.gpu_work import Comparison, Makes, TimedCall

TEMPERATURE, TOP_P, MIN_P, TOP_K, MOST = 0.6, 0.9, 1e-3, 50, 64
COVERS = ("_penalties_kernel", "_shape_kernel", "_top_p_kernel", "_draw_kernel")


def sampling_inputs(lab: Lab, num_rows: int) -> dict[str, tuple[Any, ...]]:
    """Arguments by the name of a result. Logits with ties, as those of bfloat16 have."""
    vocab_size = lab.sizes.model.vocab_size
    logits = (3 * lab.normal(num_rows, vocab_size, dtype=torch.bfloat16)).float()

    def every_row(value: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.full((num_rows,), value, dtype=dtype, device=logits.device)

    temperature, top_k = every_row(TEMPERATURE), every_row(TOP_K, torch.int64)
    counts = lab.integers(3, num_rows, vocab_size).int()
    penalties = every_row(1.3), every_row(0.2), every_row(0.1)
    most = min(MOST, vocab_size - 1)
    shaped, _ = IN_TORCH.shape(logits, temperature, None, None, vocab_size, False)
    return {
        "penalties": (logits, counts > 0, counts, *penalties),
        "temperature": (logits, temperature, None, None, vocab_size, False),
        "top-k": (logits, temperature, top_k, every_row(MIN_P), most, True),
        "top-p": (shaped, every_row(TOP_P)),
        "draw": (shaped.softmax(-1), lab.uniform(num_rows)),
    }


def computed(rules: Rules, name: str, arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    """What the rules make of them. Top-p writes into what it is given."""
    if name == "penalties":
        return [rules.apply_penalties(*arguments)]
    if name in ("temperature", "top-k"):
        found = rules.shape(*arguments)
        return [tensor for tensor in found if tensor is not None]
    if name == "top-p":
        return [rules.apply_top_p(arguments[0].clone(), arguments[1])]
    return [rules.sample_from_probs(*arguments)]


def check_sampling(lab: Lab) -> Iterator[Comparison]:
    """Bits, as integers: -inf is among the results."""
    for name, arguments in sampling_inputs(lab, min(lab.sizes.checked_rows, 12)).items():
        pairs = zip(computed(KERNELS, name, arguments), computed(IN_TORCH, name, arguments))
        for i, (found, expected) in enumerate(pairs):
            what = f"{name}, ids" if i else name
            yield Comparison("sampling", found.dtype, what, bits(found), bits(expected))


def bits(numbers: torch.Tensor) -> torch.Tensor:
    if not numbers.is_floating_point():
        return numbers
    return numbers.view({4: torch.int32, 8: torch.int64}[numbers.itemsize])


def sampling_works(lab: Lab, cell: Cell) -> Makes:
    num_rows, vocab_size = cell.num_seqs, lab.sizes.model.vocab_size
    inputs = sampling_inputs(lab, num_rows)
    numbers = num_rows * vocab_size
    most = inputs["top-k"][4]
    costs = {
        "penalties": Cost(numbers * (4 + 1 + 4 + 4)),  # logits, known, counts; logits
        "temperature": Cost(numbers * (4 + 4)),
        "top-k": Cost(numbers * 4 + num_rows * most * (8 + 8)),
        "top-p": Cost(numbers * (4 + 4)),
        "draw": sampling_cost(vocab_size, 4, num_rows),
    }
    calls: dict[str, Callable[[], Any]] = {
        name: partial(computed, KERNELS, name, arguments)
        for name, arguments in inputs.items()
        if name != "top-p"
    }
    # Called again it cuts off more, in as many passes.
    calls["top-p"] = partial(KERNELS.apply_top_p, *inputs["top-p"])
    return {f"sampling: {name}": TimedCall(call, costs[name]) for name, call in calls.items()}


def logits_bytes(lab: Lab, cell: Cell) -> int:
    """Of the inputs and what is made of them."""
    return 40 * cell.num_seqs * lab.sizes.model.vocab_size
