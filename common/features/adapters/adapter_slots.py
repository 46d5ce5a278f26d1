"""Adapters in the model: what each adds to its matrices, for the rows of its own requests.

    slot      0       1            2            max_loras
    holds     none    some adapter's matrices, on the device, up to `max_lora_rank`

    rows of a step     a a 0 b 0 a        slots of their adapters: 1 1 0 2 0 1
    ordered            0 1 5 | 3          by slot, those of slot 0 left out: once a step
    y[0 1 5] += x[0 1 5] A1^T B1^T        one product for each adapter, whoever it is for
    y[3]     += x[3] A2^T B2^T

In a graph, where the host knows no row, each row is multiplied with the A of all slots, what is not
of its own becomes 0, and all of it is multiplied with the B of all slots: two products, of as many
columns as all slots have ranks, which is little where a decode step waits for W.

A matrix of the model that is several of the checkpoint's (queries, keys and values; gate and up)
has as many A and B, for as many slices of its outputs. A rank has of A what it has of the inputs,
of B what it has of the outputs: what a row-parallel matrix adds is part of the sum over ranks.

All that were taken are in the host's memory. A step brings in whom it needs, in the place of whom
no step has needed for longest: in order with the steps before it, which may still compute.

Invariants: a row without an adapter is not touched; a step's adapters are at most `max_loras`,
which the scheduler sees to.

Sources: Chen et al., Punica (arXiv 2310.18547), computes such batches in one kernel; Sheng et al.,
S-LoRA (arXiv 2311.03285), keeps the adapters of thousands in the host's memory."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from common.features.adapters.adapter_files import Adapter, LowRank, layer_of, read_adapter
from common.models.blocks import CheckpointTensor
from common.models.linear import Linear
from common.models.model import DecoderLayer, DecoderModel
from common.models.model_config import SCORED
from worker_thread import WorkerThread

# Matrices of a layer: block, matrix, and what a checkpoint has in its place.
_FUSED = (
    ("attention", "qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    ("attention", "o", ("self_attn.o_proj",)),
    ("mlp", "gate_up", ("mlp.gate_proj", "mlp.up_proj")),
    ("mlp", "down", ("mlp.down_proj",)),
)


_FIRST = ".post_attention_layernorm.weight"  # of each layer, in every family


def matrix_shapes(parts: Mapping[str, CheckpointTensor]) -> dict[str, tuple[int, ...]]:
    """Of all matrices that can be adapted, in the whole model: [out, in], by name."""
    ends = tuple(f".{name}.weight" for _, _, names in _FUSED for name in names)
    matrices = [name for name in parts if name.endswith(ends)]
    return {name.removesuffix(".weight"): parts[name].shape for name in matrices}


# In a graph: [num_rows, num_slots], true at the slot of each row. Slot 0 holds zeros.
OwnSlot = torch.Tensor


class Ordered(NamedTuple):
    """Rows by adapter: `order[start:stop]` are those of `slot`. `order` is None if that is as they
    stand, and all of them."""

    order: torch.Tensor | None  # [num_rows] int64
    segments: Sequence[tuple[int, int, int]]  # slot, start, stop


@dataclass(frozen=True, slots=True)
class StepAdapters:
    """Of all rows of a step, and of those that go on after the last layer's attention."""

    slots: AdapterSlots
    tokens: Ordered | OwnSlot
    sampled: Ordered | OwnSlot


class AdaptedModel:
    """What is said to a model once, however many engines use it: what the pass has of adapters
    (`name`, in what the runner has staged), and where the matrices are. Another thread may be in a
    pass of another engine."""

    name = "adapter"

    def __init__(self, model: DecoderModel) -> None:
        self._of_thread = threading.local()
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._end, always_call=True)

    @property
    def step(self) -> StepAdapters | None:
        return getattr(self._of_thread, "step", None)

    def _begin(self, model: Any, arguments: tuple[Any, ...]) -> None:
        staged = arguments[0].staged
        step = staged.get(self.name)
        if step is not None and SCORED in staged:  # all tokens go on
            step = replace(step, sampled=step.tokens)
        self._of_thread.step = step

    def _end(self, model: Any, arguments: Any, result: Any) -> None:
        self._of_thread.step = None

    @classmethod
    def of(cls, model: DecoderModel) -> AdaptedModel:
        known = model.layers[0].attention.qkv.addition
        return known.adapted if isinstance(known, MatrixPlace) else cls(model)


class MatrixPlace:
    """A matrix of the model. What is added to its product: nothing, if the step has no adapters."""

    def __init__(self, adapted: AdaptedModel, index: int, lags: bool) -> None:
        self.adapted, self.index, self.lags = adapted, index, lags

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """`y`, the product [rows, out] with `x` [rows, in], is changed in place."""
        step = self.adapted.step
        if step is None:
            return y
        rows = step.sampled if self.lags else step.tokens
        return step.slots.additions[self.index].add(rows, x, y)


class AdapterSlots:
    """The slots of one engine's model, or of one rank of it; a `GraphPart`."""

    name = AdaptedModel.name

    def __init__(self, model: DecoderModel, max_loras: int, max_lora_rank: int) -> None:
        self.num_slots, self.max_lora_rank = 1 + max_loras, max_lora_rank
        parts = model.checkpoint_tensors()
        self.dtype, self.shapes = model.embed_weight.dtype, matrix_shapes(parts)
        self.taken: dict[str, Adapter] = {}  # in the host's memory: this rank's part, by digest
        self.slot_of: dict[str, int] = {}  # by digest, the longest unneeded first
        self.additions: list[Addition] = []
        adapted, last = AdaptedModel.of(model), model.config.num_hidden_layers - 1
        here = [n for n, t in parts.items() if n.endswith(_FIRST) and t.target is not None]
        for name, layer in zip(here, model.layers, strict=True):
            self._adapt(adapted, layer, name.removesuffix(_FIRST), layer_of(name) == last, parts)
        # Without the tensors: plain weights are given up when they are packed.
        self._cuts = {name: _Cut.of(tensor) for name, tensor in parts.items()}

    def _adapt(
        self,
        adapted: AdaptedModel,
        layer: DecoderLayer,
        prefix: str,
        is_last: bool,
        parts: Mapping[str, CheckpointTensor],
    ) -> None:
        for block, name, own in _FUSED:
            names = [f"{prefix}.{part}" for part in own]
            if f"{names[0]}.weight" not in parts:  # experts have no place for adapters
                continue
            matrix: Linear = getattr(getattr(layer, block), name)
            sizes = [len(_target(parts[f"{name}.weight"])) for name in names]
            matrix.addition = MatrixPlace(adapted, len(self.additions), is_last and name != "qkv")
            limits = self.num_slots, self.max_lora_rank
            self.additions.append(Addition(matrix.plain_weight(), names, sizes, *limits))

    def in_graph(self, column: torch.Tensor, logit_indices: torch.Tensor) -> StepAdapters:
        """Of a step whose rows have these slots, wherever that is captured."""
        is_own = column[:, None] == torch.arange(self.num_slots, device=column.device)
        return StepAdapters(self, is_own, is_own.index_select(0, logit_indices))

    def of_largest_step(self, num_tokens: int, num_logit_rows: int) -> dict[str, StepAdapters]:
        """What such a step has staged, in which every row has an adapter of the highest rank."""
        device = self.additions[0].a.device
        rows = (
            Ordered(torch.arange(n, device=device), [(1, 0, n)])
            for n in (num_tokens, num_logit_rows)
        )
        return {self.name: StepAdapters(self, *rows)}

    # -- who can be brought in

    def begin(self, directory: str | Path) -> Reading:
        return Reading(self, directory)

    def read(self, directory: str | Path) -> Adapter:
        """In any thread. Raises what `read_adapter` raises."""
        return read_adapter(directory, self.shapes, self.max_lora_rank, self.dtype)

    def take(self, adapter: Adapter) -> None:
        """Into the host's memory: this rank's part of it."""
        parts = {
            name: cut.of_low_rank(matrix)
            for name, matrix in adapter.matrices.items()
            if (cut := self._cuts[f"{name}.weight"]).is_here
        }
        self.taken[adapter.digest] = Adapter(adapter.digest, parts)

    def drop(self, digest: str) -> None:
        """Out of it, if it is there. No row of a step to come has it."""
        self.taken.pop(digest, None)
        self.slot_of.pop(digest, None)

    def bring_in(self, digests: Iterable[str]) -> dict[str, int]:
        """The slots of a step's adapters."""
        wanted = set(digests)
        assert len(wanted) < self.num_slots, "a step has more adapters than max_loras"
        # Those that are there go to the end of the line: nobody takes their place.
        for digest in sorted(wanted, key=lambda digest: (digest not in self.slot_of, digest)):
            slot = self.slot_of.pop(digest, None)
            if slot is None:
                slot = self._free_slot()
                self._fill(slot, self.taken[digest])
            self.slot_of[digest] = slot
        return {digest: self.slot_of[digest] for digest in wanted}

    def _free_slot(self) -> int:
        if len(self.slot_of) < self.num_slots - 1:
            used = set(self.slot_of.values())
            return next(slot for slot in range(1, self.num_slots) if slot not in used)
        return self.slot_of.pop(next(iter(self.slot_of)))

    @torch.inference_mode()
    def _fill(self, slot: int, adapter: Adapter) -> None:
        for addition in self.additions:
            addition.fill(slot, adapter.matrices)


class Reading:
    """The `Loading` of one process: a thread reads."""

    def __init__(self, slots: AdapterSlots, directory: str | Path) -> None:
        self._slots, self._thread = slots, WorkerThread("adapter", finishes=False)
        self._adapter = self._thread.submit(slots.read, directory)

    def is_over(self) -> bool:
        return self._adapter.done()

    def digest(self) -> str:
        return self._adapter.result().digest

    def take(self) -> None:
        self._slots.take(self._adapter.result())

    def forget(self) -> None:
        pass


class Addition:
    """What adapters add to the products of one matrix."""

    def __init__(
        self,
        weight: torch.Tensor,  # [out, in], for dtype and device
        names: Sequence[str],
        sizes: Sequence[int],  # of the slices of its outputs
        num_slots: int,
        max_rank: int,
    ) -> None:
        self.names, self.sizes = names, list(sizes)
        # A is zero beyond the rank of who is in a slot: a graph reads all of it.
        self.a = weight.new_zeros(num_slots, len(names), max_rank, weight.shape[1])
        self.b = [weight.new_zeros(size, num_slots, max_rank) for size in sizes]
        # Until somebody is in it, a slot is as one full of zeros is: `of_largest_step`.
        self.ranks = [[max_rank] * len(names) for _ in range(num_slots)]

    def fill(self, slot: int, matrices: Mapping[str, LowRank]) -> None:
        for i, (name, b) in enumerate(zip(self.names, self.b, strict=True)):
            matrix = matrices.get(name)
            self.ranks[slot][i] = rank = 0 if matrix is None else matrix.rank
            self.a[slot, i, rank:].zero_()
            if matrix is not None:
                self.a[slot, i, :rank].copy_(matrix.a, non_blocking=True)
                b[:, slot, :rank].copy_(matrix.b, non_blocking=True)

    def add(self, rows: Ordered | OwnSlot, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Several small products for each adapter: of each slice with its A, then with its B."""
        if isinstance(rows, OwnSlot):
            return self._add_in_graph(rows, x, y)
        order, segments = rows
        if not segments:
            return y
        x = x if order is None else x.index_select(0, order)
        added = y.new_zeros(len(x), y.shape[1])
        for slot, start, stop in segments:
            slices = added[start:stop].split(self.sizes, dim=1)
            for i, (rank, out) in enumerate(zip(self.ranks[slot], slices, strict=True)):
                if rank:
                    low = F.linear(x[start:stop], self.a[slot, i, :rank])
                    out.copy_(F.linear(low, self.b[i][:, slot, :rank]))
        return y.add_(added) if order is None else y.index_add_(0, order, added)

    def _add_in_graph(self, is_own: OwnSlot, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        low = F.linear(x, self.a.flatten(0, 2)).unflatten(1, self.a.shape[:3])
        low = low.where(is_own[:, :, None, None], 0)  # whatever stands in others' slots
        slices = zip(self.b, low.unbind(2), y.split(self.sizes, dim=1), strict=True)
        for b, of_slice, out in slices:
            out.addmm_(of_slice.flatten(1), b.flatten(1).T)
        return y


@dataclass(frozen=True, slots=True)
class _Cut:
    """What a rank has of a matrix [out, in]."""

    part: tuple[slice, ...]
    is_here: bool

    @classmethod
    def of(cls, tensor: CheckpointTensor) -> _Cut:
        return cls(tensor.part, tensor.target is not None)

    def of_low_rank(self, matrix: LowRank) -> LowRank:
        rows, columns = (*self.part, slice(None))[:2]
        return LowRank(matrix.a[:, columns].clone(), matrix.b[rows].clone())  # not all of it


def _target(tensor: CheckpointTensor) -> torch.Tensor:
    assert tensor.target is not None
    return tensor.target
