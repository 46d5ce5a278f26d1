"""A matrix split over several processes: each multiplies a part of it.

    column-parallel    a rank has some of the outputs     every rank needs all of x; nothing is sent
    row-parallel       a rank has some of the inputs      x is there in parts; products are summed

The names are from Megatron-LM, which writes a product as x @ A: there the columns of A are the
outputs. Here, as in PyTorch, `weight` is [out, in].

A column-parallel matrix followed by a row-parallel one needs no communication in between: the parts
of the first one's outputs are the parts of the second one's inputs. A column-parallel matrix is an
ordinary `Linear` with fewer rows, so it has no class here.

    vocabulary-parallel    a rank has some of the tokens: their embeddings, their logits

Source: Shoeybi et al., Megatron-LM (arXiv 1909.08053).

See common/parallel/README.md#tensor-parallel"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from common.models.collectives import Collectives
from common.models.linear import Linear


class RowParallelLinear(Linear):
    """Multiplies a rank's columns of `weight` by its part of `x` and sums over the ranks. `bias` is
    added once, by rank 0 of the stage."""

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, collectives: Collectives
    ) -> None:
        super().__init__(weight, bias if collectives.ranks.tp_rank == 0 else None)
        self._collectives = collectives

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.summed(super().forward(x))

    def summed(self, product: torch.Tensor) -> torch.Tensor:
        return self._collectives.all_reduce(product)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return residual.add_(self(x))


class VocabParallelHead(Linear):
    """Computes the logits of this rank's tokens; every rank then gathers the logits of all."""

    def __init__(self, vocab_size: int, collectives: Collectives, weight: nn.Parameter) -> None:
        super().__init__(weight)
        self._vocab_size = vocab_size
        self._collectives = collectives
        self._num_lanes = rows_per_rank(vocab_size, collectives.ranks.tensor_parallel_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [rows, hidden] -> [rows, vocab_size]
        logits = super().forward(x)
        if num_missing := self._num_lanes - logits.shape[-1]:  # parts that are gathered are equal
            logits = F.pad(logits, (0, num_missing))
        return self._collectives.all_gather(logits)[..., : self._vocab_size]


def vocab_parallel_embedding(
    input_ids: torch.Tensor,  # [num_tokens] int64
    weight: torch.Tensor,  # [num_rows, hidden_size], the embeddings of `first_id` and on
    first_id: int,
    collectives: Collectives,
) -> torch.Tensor:  # [num_tokens, hidden_size]
    """Look up embeddings. One rank holds each token; the others add zeros to the sum."""
    rows = input_ids - first_id
    is_elsewhere = (rows < 0) | (rows >= len(weight))
    found = F.embedding(rows.masked_fill_(is_elsewhere, 0), weight)
    return collectives.all_reduce(found.masked_fill_(is_elsewhere[:, None], 0))


def rows_per_rank(vocab_size: int, num_ranks: int) -> int:
    """The number of rows of every rank except the last, which can have fewer."""
    return -(-vocab_size // num_ranks)
