"""JSON of more than 256 KB: parsed and encoded by one thread outside the event loop.

The parser holds Python's lock until it has read a body, for 0.15 s at most, because `gate.py`
limits the number of values in a body. An answer is encoded a few entries at a time, as fast as its
client reads, so the lock is free in between and no complete answer is in memory. There is only one
thread, because several would take the lock from the engine in turns; clients and large answers
share it.

See common/serve/README.md#what-one-client-can-take-from-others"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from common.serve.errors import ApiError, bad
from common.serve.fair_thread import FairThread

T = TypeVar("T")
B = TypeVar("B", bound=BaseModel)
LARGE = 256 << 10  # bytes
EXPECTED = "Input should be "  # pydantic's words
_UNIONS = (Union, UnionType)
BYTES_AT_ONCE = 64 << 10  # encoded per call in the thread
# Some streaming clients treat these as line ends. A lone surrogate is escaped in the same way.
_LINE_ENDS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}
_THREAD = FairThread("large json")


def _listed(values: Any) -> list:
    if not isinstance(values, Iterator):
        raise TypeError(f"cannot encode {type(values).__name__} as JSON")
    return list(values)


_encode = json.JSONEncoder(
    ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=_listed
).encode


def to_json(content: Any) -> bytes:
    """Return `content` as JSON. An iterator becomes a list."""
    text = _encode(content)
    text = text if text.isascii() else text.translate(_LINE_ENDS)
    return text.encode("utf-8", "backslashreplace")


def json_response(content: Any, status: int = 200, headers: Any = None) -> Response:
    return Response(to_json(content), status, headers, media_type="application/json")


def answered(content: Any, num_bytes: int) -> Response:
    """Return a response with `content`, of about `num_bytes`."""
    if num_bytes <= LARGE:
        return json_response(content)
    return StreamingResponse(encode_in_thread(json_chunks(content)), media_type="application/json")


def json_chunks(content: Any) -> Iterator[bytes]:
    """Yield the output of `to_json` in parts, taking the items of iterators one by one."""
    if not _is_lazy(content):
        yield to_json(content)
    elif isinstance(content, dict):
        yield b"{"
        for i, (key, value) in enumerate(content.items()):
            yield b"," * (i > 0) + to_json(str(key)) + b":"
            yield from json_chunks(value)
        yield b"}"
    else:
        yield b"["
        for i, value in enumerate(content):
            yield b"," * (i > 0)
            yield from json_chunks(value)
        yield b"]"


def _is_lazy(content: Any) -> bool:
    if isinstance(content, dict):
        return any(map(_is_lazy, content.values()))
    if isinstance(content, list):  # a list of choices, not of numbers
        return bool(content) and isinstance(content[0], dict) and any(map(_is_lazy, content))
    return isinstance(content, Iterator)


async def encode_in_thread(parts: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the encoded bytes, `BYTES_AT_ONCE` or a little more at a time."""

    def some() -> bytes:
        found = bytearray()
        for part in parts:
            found += part
            if len(found) >= BYTES_AT_ONCE:
                break
        return bytes(found)

    while data := await run_in_thread(some):
        yield data


async def run_in_thread(call: Callable[..., T], *arguments: Any) -> T:
    return await _THREAD.run(None, call, *arguments)


async def read_body(request: Request, kind: type[B]) -> B:
    """Return the parsed body; its bytes are not kept. Raises `ApiError`."""
    data = b"".join([part async for part in request.stream()])
    request.state.num_body_bytes = len(data)
    if len(data) <= LARGE:
        return _parsed(kind, data)
    return await _THREAD.run(client_of(request), _parsed, kind, data)


def client_of(request: Request) -> str:
    """Return the client's address, which a proxy on this machine can forward."""
    return "" if request.client is None else request.client.host


def _parsed(kind: type[B], data: bytes) -> B:
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise bad(f"the body must be JSON: {error}") from None
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise _wrong_body(kind, error) from None


def _wrong_body(kind: type[BaseModel], error: ValidationError) -> ApiError:
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    location = list(errors[0]["loc"])
    message = errors[0]["msg"]
    field = str(location[0]) if location else None
    if field is not None and len(location) > 1 and _has_forms(kind, field):
        of_field = [one for one in errors if one["loc"][0] == field]
        furthest = max(map(_progress, of_field))
        best = [one for one in of_field if _progress(one) == furthest]
        form = "" if len(best) > 1 else f" (in a {best[0]['loc'][1]})".replace("constrained-", "")
        expected = [one["msg"].removeprefix(EXPECTED) for one in best]
        message = EXPECTED * best[0]["msg"].startswith(EXPECTED)
        message += " or ".join(dict.fromkeys(expected)) + form
        location = [field, *best[0]["loc"][2:]]
    place = ".".join(map(str, location))
    message = message.removeprefix("Value error, ")
    return bad(f"{place}: {message}" if place else f"the body: {message}", field)


def _has_forms(kind: type[BaseModel], field: str) -> bool:
    """Whether the field's value can be a text, a list, ...: each form has an error of its own."""
    annotation = kind.model_fields[field].annotation if field in kind.model_fields else None
    return len({*get_args(annotation)} - {NoneType}) > 1 and get_origin(annotation) in _UNIONS


def _progress(error: Mapping[str, Any]) -> tuple[tuple[int, ...], bool]:
    """How far the check of one form got: the index of the wrong item, then whether only its value
    was wrong, not its type."""
    indices = tuple(index for index in error["loc"] if isinstance(index, int))
    return indices, not error["type"].endswith("_type")
