"""Adapters in the model: slots on the device, and the products that adapters add to rows.

    slot      0       1            2            max_loras
    holds     none    an adapter's matrices, on the device, up to `max_lora_rank`

    rows of a step     a a 0 b 0 a        slots of their adapters: 1 1 0 2 0 1
    ordered            0 1 5 | 3          by slot, without slot 0: once a step
    y[0 1 5] += x[0 1 5] A1^T B1^T        one product for each adapter, for all its requests
    y[3]     += x[3] A2^T B2^T

In a graph, the host does not know the rows. So each row is multiplied with the A of all slots, the
results of other slots are set to 0, and the whole is multiplied with the B of all slots. The two
products have as many columns as all slots have ranks: cheap in a decode step, which waits for W.

A matrix of the model that fuses several of the checkpoint's (queries, keys and values; gate and up)
has one A and one B for each, for as many slices of its outputs. A rank has the part of A for its
inputs and the part of B for its outputs; the sum over ranks covers a row-parallel matrix's update.

All loaded adapters are in the host's memory. A step copies those it needs to the device, replacing
the least recently used ones, in order with the steps before it, which may still compute.

Invariants: a row without an adapter is not changed; a step has at most `max_loras` adapters, which
the scheduler ensures.

Sources: Chen et al., Punica (arXiv 2310.18547), computes such batches in one kernel; Sheng et al.,
S-LoRA (arXiv 2311.03285), keeps the adapters of thousands in the host's memory.

See 04_scheduler/beyond/ADAPTERS.md#how-is-a-mixed-batch-computed"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from common.features.adapters.adapter_files import Adapter, LowRank, read_adapter
from common.models.blocks import CheckpointTensor
from common.models.linear import Linear
from common.models.model import DecoderModel
from common.models.model_config import SCORED
from common.sampling.runner_plugin import DeviceArgs

# Matrices of a layer: block, matrix, and the checkpoint's matrices that it fuses.
_FUSED = (
    ("attention", "qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    ("attention", "o", ("self_attn.o_proj",)),
    ("mlp", "gate_up", ("mlp.gate_proj", "mlp.up_proj")),
    ("mlp", "down", ("mlp.down_proj",)),
)


def matrix_shapes(parts: Mapping[str, CheckpointTensor]) -> dict[str, tuple[int, ...]]:
    """The shapes [out, in], by name, of all matrices of the whole model that can be adapted."""
    ends = tuple(f".{name}.weight" for _, _, names in _FUSED for name in names)
    matrices = [name for name in parts if name.endswith(ends)]
    return {name.removesuffix(".weight"): parts[name].shape for name in matrices}


# In a graph: [num_rows, num_slots], true at the slot of each row. Slot 0 holds zeros.
SlotMask = torch.Tensor


@dataclass(eq=False)
class Ordered(DeviceArgs):
    """Rows by adapter: `order[start:stop]` are the rows of `slot`. `order` is None if it would be
    all rows in their present order."""

    order: Any  # [num_rows] int64
    segments: Sequence[tuple[int, int, int]]  # slot, start, stop


@dataclass(eq=False)
class StepAdapters(DeviceArgs):
    """The adapters of all rows of a step (`tokens`), and of the rows that are still computed after
    the last layer's attention (`sampled`)."""

    slots: AdapterSlots
    tokens: Ordered | SlotMask
    sampled: Ordered | SlotMask


class AdaptedModel:
    """The adapters of the model's current pass, which its matrices read: shared by all engines that
    use the model. `name` in the runner's staged data."""

    name = "adapter"

    def __init__(self, model: DecoderModel) -> None:
        self.step: StepAdapters | None = None
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._end, always_call=True)

    def _begin(self, model: Any, arguments: tuple[Any, ...]) -> None:
        staged = arguments[0].staged
        self.step = staged.get(self.name)
        if self.step is not None and SCORED in staged:  # all tokens are computed to the end
            self.step = replace(self.step, sampled=self.step.tokens)

    def _end(self, model: Any, arguments: Any, result: Any) -> None:
        self.step = None

    @classmethod
    def of(cls, model: DecoderModel) -> AdaptedModel:
        known = model.layers[0].attention.qkv.adapter
        return known.adapted if isinstance(known, MatrixAdapter) else cls(model)


class MatrixAdapter:
    """What adapters add to a matrix's product. Nothing in a step without adapters."""

    def __init__(self, adapted: AdaptedModel, index: int, lags: bool) -> None:
        self.adapted = adapted
        self.index = index
        self.lags = lags

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Add to `y` in place, the matrix's product [rows, out] with `x` [rows, in]."""
        step = self.adapted.step
        if step is None:
            return y
        rows = step.sampled if self.lags else step.tokens
        return step.slots.additions[self.index].add(rows, x, y)


class AdapterSlots:
    """The slots of one engine's model, or of one rank of it; a `GraphPart`."""

    name = AdaptedModel.name

    def __init__(self, model: DecoderModel, max_loras: int, max_lora_rank: int) -> None:
        self.num_slots = 1 + max_loras
        self.max_lora_rank = max_lora_rank
        parts = model.checkpoint_tensors()
        self.dtype = model.embed_weight.dtype
        self.shapes = matrix_shapes(parts)
        self.taken: dict[str, Adapter] = {}  # in the host's memory: this rank's part, by digest
        self.slot_of: dict[str, int] = {}  # by digest, the least recently used first
        self.additions: list[Addition] = []
        adapted = AdaptedModel.of(model)
        last = model.config.num_hidden_layers - 1
        for number, layer in zip(model.layer_range, model.layers, strict=True):
            for block, name, hf_names in _FUSED:
                names = [f"model.layers.{number}.{part}" for part in hf_names]
                if f"{names[0]}.weight" not in parts:  # adapters are not supported in experts
                    continue
                matrix: Linear = getattr(getattr(layer, block), name)
                lags = number == last and name != "qkv"
                matrix.adapter = MatrixAdapter(adapted, len(self.additions), lags)
                targets = [parts[f"{name}.weight"].target for name in names]
                addition = Addition(
                    weight=matrix.plain_weight(),
                    names=names,
                    sizes=[len(target) for target in targets if target is not None],
                    num_slots=self.num_slots,
                    max_rank=max_lora_rank,
                )
                self.additions.append(addition)
        # Does not keep the tensors, because plain weights are freed when they are packed.
        self._parts = {n: tensor.part for n, tensor in parts.items() if tensor.target is not None}

    def in_graph(self, column: torch.Tensor, logit_indices: torch.Tensor) -> StepAdapters:
        """The adapters of a step in a graph, whose rows have the slots in `column`."""
        slot_mask = column[:, None] == torch.arange(self.num_slots, device=column.device)
        return StepAdapters(self, slot_mask, slot_mask.index_select(0, logit_indices))

    # -- loading adapters

    def load(self, directory: str | Path) -> str:
        """Read this rank's part of an adapter into the host's memory, and return its digest.
        Raises the errors of `read_adapter`."""
        adapter = read_adapter(directory, self.shapes, self.max_lora_rank, self.dtype)
        matrices = {}
        for name, matrix in adapter.matrices.items():
            part = self._parts.get(f"{name}.weight")
            if part is not None:
                rows, columns = (*part, slice(None))[:2]
                # Copies, which free the whole.
                matrices[name] = LowRank(matrix.a[:, columns].clone(), matrix.b[rows].clone())
        self.taken[adapter.digest] = Adapter(adapter.digest, matrices)
        return adapter.digest

    def drop(self, digest: str) -> None:
        """Remove an adapter from the host's memory, if present. No row of a future step has it."""
        self.taken.pop(digest, None)
        self.slot_of.pop(digest, None)

    def bring_in(self, digests: Iterable[str]) -> dict[str, int]:
        """Copy a step's adapters into slots, if needed, and return their slots by digest."""
        step_digests = set(digests)
        assert len(step_digests) < self.num_slots, "a step has more adapters than max_loras"
        # Adapters that have a slot come first, so that they are marked as used and not replaced.
        for digest in sorted(step_digests, key=lambda digest: (digest not in self.slot_of, digest)):
            slot = self.slot_of.pop(digest, None)
            if slot is None:
                slot = self._free_slot()
                self._fill(slot, self.taken[digest])
            self.slot_of[digest] = slot
        return {digest: self.slot_of[digest] for digest in step_digests}

    def _free_slot(self) -> int:
        free = set(range(1, self.num_slots)) - set(self.slot_of.values())
        return min(free) if free else self.slot_of.pop(next(iter(self.slot_of)))

    @torch.inference_mode()
    def _fill(self, slot: int, adapter: Adapter) -> None:
        for addition in self.additions:
            addition.fill(slot, adapter.matrices)


class Addition:
    """The A and B of all slots for one matrix, and the products that they add."""

    def __init__(
        self,
        weight: torch.Tensor,  # [out, in], for dtype and device
        names: Sequence[str],
        sizes: Sequence[int],  # of the slices of its outputs
        num_slots: int,
        max_rank: int,
    ) -> None:
        self.names = names
        self.sizes = list(sizes)
        # A is zero beyond the rank of a slot's adapter, because a graph reads all of A.
        self.a = weight.new_zeros(num_slots, len(names), max_rank, weight.shape[1])
        self.b = [weight.new_zeros(size, num_slots, max_rank) for size in sizes]
        # An empty slot computes like an adapter of zeros.
        self.ranks = [[max_rank] * len(names) for _ in range(num_slots)]

    def fill(self, slot: int, matrices: Mapping[str, LowRank]) -> None:
        for i, (name, b) in enumerate(zip(self.names, self.b, strict=True)):
            matrix = matrices.get(name)
            self.ranks[slot][i] = rank = 0 if matrix is None else len(matrix.a)
            self.a[slot, i, rank:].zero_()
            if matrix is not None:
                self.a[slot, i, :rank].copy_(matrix.a, non_blocking=True)
                b[:, slot, :rank].copy_(matrix.b, non_blocking=True)

    def add(self, rows: Ordered | SlotMask, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Add the adapters' products to `y` in place: for each adapter and slice, first with its A,
        then with its B."""
        if isinstance(rows, SlotMask):
            return self._add_in_graph(rows, x, y)
        order = rows.order
        segments = rows.segments
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

    def _add_in_graph(self, slot_mask: SlotMask, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        low = F.linear(x, self.a.flatten(0, 2)).unflatten(1, self.a.shape[:3])
        low = low.where(slot_mask[:, :, None, None], 0)  # also NaN from other slots becomes 0
        slices = zip(self.b, low.unbind(2), y.split(self.sizes, dim=1), strict=True)
        for b, of_slice, out in slices:
            out.addmm_(of_slice.flatten(1), b.flatten(1).T)
        return y
