"""How often each token is in what a request has seen, for the penalties: counted once, then kept.

A penalty asks of every token of the vocabulary whether it is in the prompt or the output, and how
often. A history only grows, so a step adds what is new of it, whatever its length:

    table [slots, vocab_size] int32     2 * (times in the output) + (1 if in the prompt)

A slot belongs to one pair of lists, a prompt and an output, told apart by identity: the runner's
live lists keep their slot, and a history in new lists is counted anew. Drafts are added to the
copy that a step takes, never to the table. There are at most twice as many slots as histories were
ever asked for at once; the one that was not used for longest is given away."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch


@dataclass(slots=True)
class _CountedHistory:
    """The lists are held, so that no other list can have their identity."""

    slot: int
    prompt: list[int]
    output: list[int]
    num_counted: int = -1  # tokens of the output; -1: not even the prompt


class TokenCounts:
    """Counts of the histories that were asked for, for one vocabulary on one device at a time."""

    def __init__(self) -> None:
        # By last use.
        self._histories: OrderedDict[tuple[int, int], _CountedHistory] = OrderedDict()
        self._table = torch.zeros(0, 0, dtype=torch.int32)

    def count(
        self,
        prompts: Sequence[list[int]],
        outputs: Sequence[list[int]],
        drafts: Sequence[list[int]],
        vocab_size: int,
        device: torch.device,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Which tokens are in each row's prompt, output or drafts, bool [R, vocab_size], and how
        often in its output and drafts, int32 [R, vocab_size]. Ids beyond the vocabulary are left
        out. Prompts may not change, and outputs only grow. O(new tokens), and R rows are copied."""
        rows = [(id(p), id(o)) for p, o in zip(prompts, outputs, strict=True)]
        wanted = {key: lists for key, *lists in zip(rows, prompts, outputs)}
        self._make_room(len(wanted), vocab_size, device)
        found = {key: self._use(key, *lists) for key, lists in wanted.items()}
        self._catch_up(list(found.values()))
        counts = self._table[torch.tensor([found[key].slot for key in rows], device=device)]
        _add(counts, range(len(rows)), drafts)
        return counts > 0, counts >> 1

    def _make_room(self, num_histories: int, vocab_size: int, device: torch.device) -> None:
        """Slots for all of a call. A larger table is filled anew, which doubling makes rare."""
        slots, width = self._table.shape
        if slots < num_histories or width != vocab_size or self._table.device != device:
            self._histories.clear()
            slots = max(slots, 2 * num_histories)
            with torch.inference_mode(False):  # in which it could not be written to outside of it
                self._table = torch.zeros(slots, vocab_size, dtype=torch.int32, device=device)

    def _use(self, key: tuple[int, int], prompt: list[int], output: list[int]) -> _CountedHistory:
        history = self._histories.get(key)
        if history is None:
            slot = len(self._histories)
            if slot == len(self._table):
                slot = self._histories.popitem(last=False)[1].slot
            history = self._histories[key] = _CountedHistory(slot, prompt, output)
        self._histories.move_to_end(key)
        if history.num_counted > len(output):
            history.num_counted = -1
        return history

    def _catch_up(self, histories: list[_CountedHistory]) -> None:
        new = [h for h in histories if h.num_counted < 0]
        if new:
            self._table[[h.slot for h in new]] = 0
            indices = _indices([h.slot for h in new], [h.prompt for h in new], self._table)
            self._table.view(-1)[indices] = 1
        outputs = [h.output[max(h.num_counted, 0) :] for h in histories]
        _add(self._table, [h.slot for h in histories], outputs)
        for history in histories:
            history.num_counted = len(history.output)


def _add(table: torch.Tensor, rows: Iterable[int], token_ids: Sequence[Sequence[int]]) -> None:
    indices = _indices(rows, token_ids, table)
    table.view(-1).scatter_add_(0, indices, torch.full_like(indices, 2, dtype=table.dtype))


def _indices(
    rows: Iterable[int], token_ids: Sequence[Sequence[int]], table: torch.Tensor
) -> torch.Tensor:
    """Where the tokens stand in the flat table, int64 on its device."""
    lengths = [len(ids) for ids in token_ids]
    ids = np.fromiter(chain.from_iterable(token_ids), dtype=np.int64, count=sum(lengths))
    starts = np.repeat(np.fromiter(rows, dtype=np.int64) * table.shape[1], lengths)
    return torch.from_numpy((starts + ids)[ids < table.shape[1]]).to(table.device)
