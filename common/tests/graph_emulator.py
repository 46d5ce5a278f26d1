"""A CUDA graph emulated on a CPU: replays a captured step and checks for every known mistake.

A CUDA graph forgets the Python that launched its kernels. `EmulatedGraphs` does too: a capture
records each PyTorch operation with its arguments, and a replay runs that list again, on the same
tensors:

    aten.embedding     weight, input_ids            static inputs, weights, caches: by address
    aten.view          the result above, [4, 64]    computed tensors: the result of this replay
    aten.add           ..., 0.25                    numbers, sizes, lists: as they were at capture

So a replay has no metadata, no host value and no Python of its step. Launches of Triton's kernels
are on the list, too. The checks:

    at capture      a wait for the device raises `CannotCapture`: `item`, `tolist`,
                    `bool(tensor)`, masks as indices, numbers that come from the host
    before each     the address of every input, weight and cache is unchanged; padding is correct
    in each         fresh memory (`empty`) and the null block are full of NaN
    after each      only the slots of real rows were written; earlier outputs are NaN;
                    the inputs are poisoned: ids and positions out of range, the null block

The emulation cannot show the order and races of streams, memory that is freed too early, or speed.
It does not see computation outside of PyTorch (compiled C++).

See common/README.md#graphs"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from common.runner.graphs import CannotCapture, DecodeGraphs, StaticInputs
from kernel_launch import Launch

OUT_OF_RANGE = 1 << 40
# Methods that read a tensor on the host, or copy it there.
_READS = {"item", "tolist", "numpy", "cpu", "nonzero", "masked_select", "unique"}
_READS |= {f"__{name}__" for name in ("bool", "int", "float", "index", "array", "contains")}
# Operations whose result size only the device knows, and uploads of single numbers.
_WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "lift_fresh"}
_FRESH = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"}


@dataclass(frozen=True, slots=True)
class GraphTensors:
    """All tensors that a captured step may read, as stored now. Caches are also written."""

    inputs: dict[str, torch.Tensor]
    caches: Sequence[torch.Tensor]  # each [num_blocks, block_size, num_kv_heads, head_dim]
    weights: dict[str, torch.Tensor]

    @classmethod
    def of(cls, graphs: DecodeGraphs, bucket: int) -> GraphTensors:
        x = graphs.inputs[bucket]
        inputs = {field.name: getattr(x, field.name) for field in fields(x)}
        if graphs.part is not None:
            inputs[graphs.part.name] = graphs.column[:bucket]
        caches = [*graphs.kv_cache.key_cache, *graphs.kv_cache.value_cache]
        weights = dict(graphs.model.named_parameters()) | dict(graphs.model.named_buffers())
        return cls(inputs, caches, weights)


class GraphError(AssertionError):
    """Raised where a replay on a GPU would have failed, silently or not."""


class NoReads(TorchFunctionMode):
    """A mode in which host reads of tensors raise `CannotCapture`."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in _READS:
            raise CannotCapture(f"{name} synchronizes with the device")
        return func(*args, **(kwargs or {}))


@dataclass(slots=True)
class _Call:
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: Sequence[Any]


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []

    def launch(self, *call: Any) -> None:
        """Launch a kernel, which is no operation of PyTorch, and record that."""
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            _launch(*call)
        self.calls.append(_Call(_launch, call, {}, (None,)))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        check_no_wait(func, tree_leaves((args, kwargs or {})))
        result = func(*args, **(kwargs or {}))
        self.calls.append(_Call(func, args, kwargs or {}, _as_sequence(result)))
        return result


_call_kernel = Launch.__call__


def _launch(launch: Launch, grid: Sequence[int], *arguments: Any) -> None:
    _call_kernel(launch, tuple(grid), *arguments)


def _as_sequence(result: Any) -> Sequence[Any]:
    return result if isinstance(result, tuple | list) else (result,)


def check_no_wait(func: Any, leaves: list[Any]) -> None:
    """Raise `CannotCapture` if the operation waits for the device. A mask as an index does, because
    the host needs the number of selected elements."""
    name = func.__name__.split(".")[0]
    masks = [x for x in leaves[1:] if isinstance(x, torch.Tensor) and x.dtype == torch.bool]
    if name in _WAITS or (masks and name in ("index", "index_put", "index_put_")):
        raise CannotCapture(f"{func} synchronizes with the device")


class _Recording:
    """The recorded operations of one captured function."""

    def __init__(self, function: Callable[[], torch.Tensor]) -> None:
        with Recorder() as recorder:
            seen = lambda launch, *call: recorder.launch(launch, *call)  # noqa: E731
            with patch.object(Launch, "__call__", seen):
                self.output = function()
        self.calls = recorder.calls

    def run(self) -> torch.Tensor:
        now: dict[int, Any] = {}  # id of a tensor computed at capture -> the tensor of this replay

        def of_now(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return now.get(id(value), value)
            return [*map(of_now, value)] if isinstance(value, tuple | list) else value

        for call in self.calls:
            kwargs = {name: of_now(value) for name, value in call.kwargs.items()}
            results = _as_sequence(call.func(*map(of_now, call.args), **kwargs))
            if call.func.__name__.split(".")[0] in _FRESH:
                for result in results:
                    poison(result)
            now.update(zip(map(id, call.results), results, strict=True))
        return now.get(id(self.output), self.output)


def poison(tensor: torch.Tensor) -> None:
    tensor.fill_(float("nan") if tensor.is_floating_point() else _worst(tensor.dtype))


def _worst(dtype: torch.dtype) -> int:
    return 1 if dtype == torch.bool else min(OUT_OF_RANGE, torch.iinfo(dtype).max)


class EmulatedGraphs:
    """`CudaGraphs` that raise `GraphError` where a CUDA graph would give wrong tokens or worse."""

    def __init__(self) -> None:
        self._recordings: dict[int, _Recording] = {}
        self._tensors: dict[int, Callable[[], GraphTensors]] = {}
        self._addresses: dict[int, dict[str, int]] = {}
        self._outputs: torch.Tensor | None = None  # memory of all buckets' outputs

    @torch.inference_mode()
    def capture(self, bucket: int, function: Callable[[], torch.Tensor]) -> None:
        tensors = partial(GraphTensors.of, function.func.__self__, bucket)  # type: ignore
        with NoReads():
            function()  # warm-up, as on a GPU, where libraries allocate memory
            recording = self._recordings[bucket] = _Recording(function)
        if self._outputs is None:  # the first bucket is the largest
            self._outputs = recording.output
        if recording.output.data_ptr() != self._outputs.data_ptr():
            raise GraphError(f"the output of bucket {bucket} must be at the largest one's address")
        self._tensors[bucket] = tensors
        self._addresses[bucket] = _addresses(tensors())
        _poison_inputs(tensors())

    @torch.inference_mode()
    def replay(self, bucket: int, num_rows: int) -> torch.Tensor:
        tensors = self._tensors[bucket]()
        _check_addresses(self._addresses[bucket], _addresses(tensors))
        _check_padding(tensors, num_rows)
        assert self._outputs is not None
        poison(self._outputs)
        for cache in tensors.caches:
            poison(cache[0])
        with _only_these_slots(tensors, num_rows):
            outputs = self._recordings[bucket].run()
        _poison_inputs(tensors)
        return outputs


class EagerGraphs:
    """`CudaGraphs` that call the function again: only the buckets and their padding are tested."""

    def __init__(self) -> None:
        self._functions: dict[int, Callable[[], torch.Tensor]] = {}

    def capture(self, bucket: int, function: Callable[[], torch.Tensor]) -> None:
        self._functions[bucket] = function

    def replay(self, bucket: int, num_rows: int) -> torch.Tensor:
        return self._functions[bucket]()


def _addresses(tensors: GraphTensors) -> dict[str, int]:
    caches = {f"KV cache {i}": cache for i, cache in enumerate(tensors.caches)}
    return {
        name: tensor.data_ptr()
        for name, tensor in {**tensors.inputs, **caches, **tensors.weights}.items()
        if tensor.layout == torch.strided
    }


def _check_addresses(at_capture: dict[str, int], now: dict[str, int]) -> None:
    moved = [name for name in at_capture if now.get(name) != at_capture[name]]
    if moved:
        raise GraphError(f"address changed since the capture of the graph: {', '.join(moved)}")


def _check_padding(tensors: GraphTensors, num_rows: int) -> None:
    """Check that padding rows contain the values that `graphs.py` promises."""
    x = tensors.inputs
    for name, padding in (
        ("slot_mapping", -1),
        ("seq_lens", 0),
        ("block_tables", 0),
        ("input_ids", 0),
        ("positions", 0),
        *((name, 0) for name in x if name not in StaticInputs.__dataclass_fields__),
    ):
        of_groups = name in ("slot_mapping", "block_tables")
        found = x[name][:, num_rows:] if of_groups else x[name][num_rows:]
        if bool((found != padding).any()):
            raise GraphError(f"{name} of padding must be {padding}, got {found.tolist()}")
    if x["query_start_loc"].tolist() != [
        min(i, num_rows) for i in range(len(x["query_start_loc"]))
    ]:
        raise GraphError(f"query_start_loc must be of {num_rows} rows, got {x['query_start_loc']}")


def _poison_inputs(tensors: GraphTensors) -> None:
    """Poison the inputs, so that the next step cannot use values that it did not write."""
    for name, tensor in tensors.inputs.items():
        if name == "block_tables":
            tensor.zero_()
        else:
            poison(tensor)


@contextmanager
def _only_these_slots(tensors: GraphTensors, num_rows: int) -> Iterator[None]:
    """Check that the KV of all other slots stays unchanged, except for the null block."""
    before = [cache.clone() for cache in tensors.caches]
    yield
    allowed = set(tensors.inputs["slot_mapping"][:, :num_rows].flatten().tolist())
    for cache, old in zip(tensors.caches, before, strict=True):
        found = cache.contiguous().view(torch.uint8)
        is_other = (found != old.contiguous().view(torch.uint8)).flatten(2).any(-1)
        is_other[0] = False
        slots = set(is_other.flatten().nonzero().flatten().tolist())
        if slots - allowed:
            raise GraphError(f"slots must be in {sorted(allowed)}, got {sorted(slots - allowed)}")
