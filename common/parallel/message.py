"""The messages between the scheduling process and the computing processes: bytes of msgpack. Their
kinds are in `TO_WORKER` and `FROM_WORKER`.

A message is a map whose keys are exactly the expected ones: a missing field, one too many and
another version are refused. Sets travel as sorted lists, parameters as their fields. Only Python's
own numbers, strings, lists and maps with string keys are packed, checked by exact type: a NumPy
number, a tuple or an object raises `TypeError` here instead of arriving as something else.

Never pickle: it would run any code that the bytes name, and would also send the scheduler's state
and the whole history of each request, because a plan points to them.

nano-vllm pickles method names and `Sequence` objects into a shared memory of 1 MiB with a fixed
name; vLLM pickles `SchedulerOutput` into a ring buffer of shared memory.

See common/parallel/README.md#processes"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import msgpack

from common.requests.input_processor import TOKEN_RULE_FIELDS, DrawnSeedParams
from common.sampling.distributions import TokenLogprobs
from request import SamplingParams
from scheduler_interface import (
    BlockTableUpdate,
    CachedRequestData,
    NewRequestData,
    RunnerInput,
    StepOutput,
)

VERSION = 3
START = 0  # the number of "start", and of its answer
# The fields of each kind.
TO_WORKER = {
    # The rank, the configuration, and where the ranks meet.
    "start": (
        "config",
        "rank",
        "limits",
        "eos_token_ids",
        "store_port",
        "threads",
        "log_level",
        "has_connector",
    ),
    "plan": ("number", "plan", "times"),  # a step's `RunnerInput` (chapter 1)
    "read": ("number", "block_id"),  # the bytes of a KV block
    "write": ("block_id", "data"),
    "adapter": ("number", "directory"),  # read this directory while steps go on
    "take": ("number", "is_wanted"),  # use the read adapter from now on, or discard it
    "drop": ("digest",),  # discard an adapter in use
    "close": (),
}
FROM_WORKER = {
    "ready": ("number", "facts"),  # what the worker's model is
    "output": ("number", "output", "digest"),  # to "plan": `StepOutput`; most ranks send none
    "block": ("number", "data"),  # to "read"
    "adapter": ("number", "digest", "kind_of_error", "sentence"),  # or why it is refused
    "error": ("kind_of_error", "sentence", "is_collective"),
}
_BIG_INTEGER = 1  # of msgpack's extensions: an integer beyond 64 bits, such as a `max_tokens`


class MessageError(ValueError):
    """Bytes that are not a message of this version."""


def pack(kind: str, **content: Any) -> bytes:
    """Pack a message. Raises `TypeError` for content that cannot be sent."""
    message = {"version": VERSION, "kind": kind, **content}
    packer = msgpack.Packer(
        strict_types=True, default=_refuse, unicode_errors="surrogatepass", autoreset=False
    )
    packer.pack(message)
    return packer.bytes()


def pack_error(error: BaseException) -> bytes:
    """Pack an error. `is_collective`: another rank, gone or late, is at fault."""
    chain = [error, error.__cause__, error.__context__]
    is_collective = any(type(e).__name__ == "CollectiveError" for e in chain)
    kind_of_error = type(error).__name__
    sentence = str(error)
    return pack(
        "error", kind_of_error=kind_of_error, sentence=sentence, is_collective=is_collective
    )


def unpack(data: bytes | bytearray | memoryview, kinds: Mapping[str, Any]) -> tuple[str, dict]:
    """Return a message's `(kind, content)`. `kinds` are the expected kinds, each with the names of
    its fields. Raises `MessageError`."""
    try:
        message = msgpack.unpackb(
            data,
            ext_hook=_extension,
            unicode_errors="surrogatepass",
        )
    except (ValueError, msgpack.UnpackException) as error:  # what msgpack raises is one of them
        raise MessageError(f"cannot decode the message: {error}") from error
    if not isinstance(message, dict) or message.pop("version", None) != VERSION:
        raise MessageError(f"message must be of version {VERSION}")
    kind = message.pop("kind", None)
    if kind not in kinds:
        raise MessageError(f"message must be of kind {', '.join(kinds)}, got {kind!r}")
    _check_fields(kind, message, kinds[kind])
    return kind, message


def _refuse(value: Any) -> Any:
    if type(value) is int:  # msgpack's own end at 64 bits
        size = value.bit_length() // 8 + 1
        return msgpack.ExtType(_BIG_INTEGER, value.to_bytes(size, "big", signed=True))
    if isinstance(value, str):  # a subclass, such as NumPy's
        return str(value)
    raise TypeError(f"cannot send {value!r}: a {type(value).__name__} cannot be encoded")


def _extension(code: int, data: bytes) -> Any:
    if code != _BIG_INTEGER:
        raise ValueError(f"unknown extension {code}")
    return int.from_bytes(data, "big", signed=True)


def _check_fields(name: str, found: Any, expected: Any) -> None:
    if not isinstance(found, dict):
        raise MessageError(f"{name} must be a map")
    if found.keys() != set(expected):
        missing = sorted(set(expected) - found.keys())
        unknown = sorted(found.keys() - set(expected))
        raise MessageError(f"{name} lacks {sorted(missing)} and has unknown {sorted(unknown)}")


def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


_PARAMS, _NEW = _names(SamplingParams), _names(NewRequestData)
_CACHED = _names(CachedRequestData)
_PLAN = _names(RunnerInput)
_OUTPUT = _names(StepOutput)


def _as_map(value: Any, names: tuple[str, ...], **instead: Any) -> dict[str, Any]:
    return {name: instead[name] if name in instead else getattr(value, name) for name in names}


def _made(
    kind: Callable[..., Any], label: str, found: Any, names: tuple[str, ...], **instead
) -> Any:
    _check_fields(label, found, names)
    try:
        return kind(**{name: instead.get(name, _same)(found[name]) for name in names})
    except MessageError:
        raise
    except (TypeError, KeyError, ValueError) as error:
        raise MessageError(f"{label}: {error}") from error


def _same(value: Any) -> Any:
    return value


# -- plans


def plan_to_map(plan: RunnerInput) -> dict[str, Any]:
    """Return the plan as a map. Fields that only a `SchedulerOutput` has are left out."""
    cached = plan.scheduled_cached_reqs
    return _as_map(
        plan,
        _PLAN,
        scheduled_new_reqs=[
            _as_map(
                new,
                _NEW,
                sampling_params=_params_to_map(new.sampling_params),
                block_ids=list(new.block_ids),
                features=_checked_features(new),
            )
            for new in plan.scheduled_new_reqs
        ],
        scheduled_cached_reqs=_as_map(
            cached,
            _CACHED,
            new_block_ids=list(map(list, cached.new_block_ids)),
            resumed_req_ids=sorted(cached.resumed_req_ids),
        ),
        finished_req_ids=sorted(plan.finished_req_ids),
        block_moves=[[m.req_id, m.block_index, m.block_id, m.group] for m in plan.block_moves],
    )


def plan_from_map(found: Any) -> RunnerInput:
    """Rebuild a plan from a map. Raises `MessageError`."""
    of_new = {"sampling_params": _params_from_map, "block_ids": _tables}

    def new_requests(news: Any) -> list[NewRequestData]:
        return [_made(NewRequestData, "a new request", new, _NEW, **of_new) for new in news]

    def new_block_ids(rows: Any) -> list[Any]:
        return [() if tables == [] else _tables(tables) for tables in rows]

    def changed_requests(cached: Any) -> CachedRequestData:
        return _made(
            CachedRequestData,
            "changed requests",
            cached,
            _CACHED,
            new_block_ids=new_block_ids,
            resumed_req_ids=set,
        )

    return _made(
        RunnerInput,
        "a plan",
        found,
        _PLAN,
        scheduled_new_reqs=new_requests,
        scheduled_cached_reqs=changed_requests,
        finished_req_ids=set,
        block_moves=lambda moves: [BlockTableUpdate(*move) for move in moves],
    )


def _tables(found: Any) -> tuple[list[int], ...]:
    """A request's block tables: a list of block ids for each group of layers."""
    if not isinstance(found, list) or not all(isinstance(ids, list) for ids in found):
        raise MessageError(f"block tables must be a list of lists of block ids, got {found!r}")
    return tuple(found)


def _checked_features(new: NewRequestData) -> dict[str, Any]:
    """Return the features. A feature that cannot be sent raises a `TypeError` that names it."""
    for name, data in new.features.items():
        try:
            unpack(pack("features", data={name: data}), {"features": ["data"]})
        except (TypeError, ValueError) as error:
            raise TypeError(f"features[{name!r}] of request {new.req_id!r}: {error}") from error
    return new.features


def _params_to_map(params: SamplingParams) -> dict[str, Any]:
    lists = {"stop": list(params.stop), "stop_token_ids": list(params.stop_token_ids)}
    # A worker gets the needed parts of these as features: plain data.
    rules = *TOKEN_RULE_FIELDS, "prompt_logprobs", "truncate_prompt_tokens", "grammar"
    stay = dict.fromkeys(rules)
    is_seed_drawn = isinstance(params, DrawnSeedParams)
    return {**_as_map(params, _PARAMS, **lists, **stay), "is_seed_drawn": is_seed_drawn}


def _params_from_map(found: Any) -> SamplingParams:
    _check_fields("sampling_params", found, (*_PARAMS, "is_seed_drawn"))
    kind = DrawnSeedParams if found.pop("is_seed_drawn") else SamplingParams
    return _made(kind, "sampling_params", found, _PARAMS)


# -- answers


def output_to_map(output: StepOutput) -> dict[str, Any]:
    entries = {name: _entries_to_map(getattr(output, name)) for name in _WITH_ENTRIES}
    return _as_map(output, _OUTPUT, **entries)


def output_from_map(found: Any) -> StepOutput:
    """Rebuild a step output from a map. Raises `MessageError`."""
    entries = dict.fromkeys(_WITH_ENTRIES, _entries_from_map)
    return _made(StepOutput, "an output", found, _OUTPUT, **entries)


_WITH_ENTRIES = "logprobs", "prompt_logprobs"


def _entries_to_map(logprobs: dict[str, list[TokenLogprobs]]) -> dict[str, list]:
    return {
        req_id: [
            [entry.token_id, entry.logprob, entry.rank, list(entry.top), list(entry.top.values())]
            for entry in entries
        ]
        for req_id, entries in logprobs.items()
    }


def _entries_from_map(logprobs: dict[str, list]) -> dict[str, list[TokenLogprobs]]:
    return {
        req_id: [
            TokenLogprobs(token, logprob, rank, dict(zip(ids, values, strict=True)))
            for token, logprob, rank, ids, values in entries
        ]
        for req_id, entries in logprobs.items()
    }
