"""The messages between the scheduling process and the computing processes: bytes of msgpack. Their
kinds are in `TO_WORKER` and `FROM_WORKER`.

A message is a map whose keys are exactly the expected ones: a missing field, one too many and
another version are refused. Plain data, sets, tuples and the objects of `_CLASSES` arrive as they
were sent, checked by exact type: a NumPy number or another object raises `TypeError` here instead
of arriving as something else.

Never pickle: it would run any code that the bytes name, and would also send the scheduler's state
and the whole history of each request, because a plan points to them.

nano-vllm pickles method names and `Sequence` objects into a shared memory of 1 MiB with a fixed
name; vLLM pickles `SchedulerOutput` into a ring buffer of shared memory.

See common/parallel/README.md#processes"""

from __future__ import annotations

from collections.abc import Mapping
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
# msgpack's extensions: an integer beyond 64 bits, such as a `max_tokens`; and objects.
_BIG_INTEGER, _SET, _TUPLE, _FIRST_CLASS = range(1, 5)
_CLASSES = (
    RunnerInput,  # of a `SchedulerOutput` only its half
    NewRequestData,
    CachedRequestData,
    BlockTableUpdate,
    DrawnSeedParams,
    SamplingParams,
    StepOutput,
    TokenLogprobs,
)
_NAMES = {kind: tuple(field.name for field in fields(kind)) for kind in _CLASSES}
# A worker gets the needed parts of these as features: plain data.
_FEATURES = dict.fromkeys(
    (*TOKEN_RULE_FIELDS, "prompt_logprobs", "truncate_prompt_tokens", "grammar")
)


class MessageError(ValueError):
    """Bytes that are not a message of this version."""


def pack(kind: str, **content: Any) -> bytes:
    """Pack a message. Raises `TypeError` for content that cannot be sent."""
    return _pack({"version": VERSION, "kind": kind, **content})


def pack_error(error: BaseException) -> bytes:
    """Pack an error. `is_collective`: another rank, gone or late, is at fault."""
    chain = [error, error.__cause__, error.__context__]
    return pack(
        "error",
        kind_of_error=type(error).__name__,
        sentence=str(error),
        is_collective=any(type(e).__name__ == "CollectiveError" for e in chain),
    )


def unpack(data: bytes, kinds: Mapping[str, Any]) -> tuple[str, dict]:
    """Return a message's `(kind, content)`. `kinds` are the expected kinds, each with the names of
    its fields. Raises `MessageError`."""
    try:
        message = _unpack(data)
    except MessageError:
        raise
    except (ValueError, msgpack.UnpackException) as error:  # what msgpack raises is one of them
        raise MessageError(f"cannot decode the message: {error}") from error
    if not isinstance(message, dict) or message.pop("version", None) != VERSION:
        raise MessageError(f"message must be of version {VERSION}")
    kind = message.pop("kind", None)
    if kind not in kinds:
        raise MessageError(f"message must be of kind {', '.join(kinds)}, got {kind!r}")
    _check_fields(kind, message, kinds[kind])
    return kind, message


def _pack(content: Any) -> bytes:
    packer = msgpack.Packer(
        strict_types=True, default=_encode, unicode_errors="surrogatepass", autoreset=False
    )
    packer.pack(content)
    return packer.bytes()


def _unpack(data: bytes) -> Any:
    return msgpack.unpackb(
        data, ext_hook=_decode, unicode_errors="surrogatepass", strict_map_key=False
    )


def _encode(value: Any) -> Any:
    """Encode what is no plain data."""
    if type(value) is int:  # msgpack's own end at 64 bits
        size = value.bit_length() // 8 + 1
        return msgpack.ExtType(_BIG_INTEGER, value.to_bytes(size, "big", signed=True))
    if isinstance(value, str):  # a subclass, such as NumPy's
        return str(value)
    if type(value) is set:
        return msgpack.ExtType(_SET, _pack(sorted(value)))
    if type(value) is tuple:
        return msgpack.ExtType(_TUPLE, _pack(list(value)))
    for code, kind in enumerate(_CLASSES, _FIRST_CLASS):
        if isinstance(value, kind):
            return msgpack.ExtType(code, _pack(_fields_of(value, kind)))
    raise TypeError(f"cannot send {value!r}: a {type(value).__name__} cannot be encoded")


def _decode(code: int, data: bytes) -> Any:
    if code == _BIG_INTEGER:
        return int.from_bytes(data, "big", signed=True)
    if not _SET <= code < _FIRST_CLASS + len(_CLASSES):
        raise ValueError(f"unknown extension {code}")
    content = _unpack(data)
    if code == _SET:
        return set(content)
    if code == _TUPLE:
        return tuple(content)
    kind = _CLASSES[code - _FIRST_CLASS]
    _check_fields(kind.__name__, content, _NAMES[kind])
    try:
        if kind is CachedRequestData:
            content["new_block_ids"] = [tables or () for tables in content["new_block_ids"]]
        return kind(**content)
    except (TypeError, ValueError) as error:
        raise MessageError(f"{kind.__name__}: {error}") from error


def _fields_of(value: Any, kind: type) -> dict[str, Any]:
    content = {name: getattr(value, name) for name in _NAMES[kind]}
    if isinstance(value, SamplingParams):
        return content | _FEATURES
    if kind is CachedRequestData:  # mostly (): a tuple takes longer than a number
        content["new_block_ids"] = [tables or 0 for tables in value.new_block_ids]
    if kind is NewRequestData:
        for name, data in value.features.items():
            try:
                _pack(data)
            except TypeError as error:
                reason = f"features[{name!r}] of request {value.req_id!r}: {error}"
                raise TypeError(reason) from error
    return content


def _check_fields(name: str, found: Any, expected: Any) -> None:
    if not isinstance(found, dict):
        raise MessageError(f"{name} must be a map")
    if found.keys() != set(expected):
        missing = sorted(set(expected) - found.keys())
        unknown = sorted(found.keys() - set(expected))
        raise MessageError(f"{name} lacks {missing} and has unknown {unknown}")
