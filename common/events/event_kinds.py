"""The events of an engine as data: one frozen class per kind, one JSON object per line.

    {"kind":"taken","request":"a","blocks":[1,2]}       kind names the class, the rest its fields

A file is a `run` line and then events in the order in which they happened. The events of a step:

    taken, admitted, ...  planned        effects of planning, and the plan
    computed                             the step's results
    finished, freed, ...  updated        effects of the results, and the end of the step

Arrivals and aborts appear between steps. Where steps overlap, `planned` of step n + 1 comes before
`computed` of step n.

Field types are the documentation and are checked when a line is read. Times are seconds since the
`run` line, durations are milliseconds. This module needs only Python's standard library.

A change that an old reader would misunderstand raises `VERSION`. Compared with Chrome's trace
format and vLLM's KV cache events, this format adds reasons, queues and tokens."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Union, get_args, get_origin, get_type_hints

VERSION = 1

# Why a waiting request did not run. A skipped request has a separate reason; all requests after
# the one at which admission stopped share its reason.
REASONS = {
    "budget": "the tokens of this step were spent",
    "blocks": "too few KV blocks were free, or those left are kept for running requests",
    "preempting": "a step that preempts admits none",
    "seat": "every batch slot is taken (max_num_seqs)",
    "constraint": "a rule held it back: a static batch, too many long prompts, an adapter",
    "parent": "another request is computing the block that it could share",
    "remote_kv": "its KV is on its way from a tier or a store",
    "grammar": "its grammar is being compiled",
    "pending": "a token of it was still in flight when it was preempted",
    "turn": "this step was for decoding requests",
    "enough": "so many requests were skipped before it that no other was tried",
}


@dataclass(frozen=True, slots=True)
class Event:
    """Base class of all kinds."""

    kind: ClassVar[str]


@dataclass(frozen=True, slots=True)
class Run(Event):
    """First line: the engine that ran and its versions. `config` holds the settings by name.

    With `windows` a request has one block table per window (0: no limit), and the cache holds no
    references: a block that no request holds is free, and findable until it is allocated."""

    kind: ClassVar[str] = "run"
    version: int
    started_at: float  # seconds since 1970
    scheduler: str
    policy: str
    prefix_cache: str | None
    block_size: int
    num_blocks: int  # the null block, 0, included
    max_num_seqs: int
    max_num_batched_tokens: int
    overlaps: bool  # two steps can be in flight
    config: dict[str, Any]
    model: dict[str, Any]
    versions: dict[str, str]
    windows: list[int] = field(default_factory=list)  # per group of layers, if any has a window


# -- requests


@dataclass(frozen=True, slots=True)
class Arrived(Event):
    """A request joined the end of the waiting queue. `pieces[i]` is the text that `prompt[i]` adds;
    empty without a tokenizer. `tenant` is a label that tells cache salts apart, not the salt.
    `order_key` is the policy's sort key, as text. `adapter` is a name, `grammar` a kind: "json"."""

    kind: ClassVar[str] = "arrived"
    time: float
    request: str
    prompt: list[int]
    pieces: list[str]
    max_tokens: int
    priority: int
    tenant: str = ""
    order_key: str = ""
    adapter: str = ""
    grammar: str = ""


@dataclass(frozen=True, slots=True)
class Queue(Event):
    """The waiting requests are now in this order, which is not the order of arrival."""

    kind: ClassVar[str] = "queue"
    order: list[str]


@dataclass(frozen=True, slots=True)
class Admitted(Event):
    """A request starts to run, or runs again after a preemption. KV of its first
    `num_cached_tokens` tokens was found in the cache."""

    kind: ClassVar[str] = "admitted"
    request: str
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Preempted(Event):
    """A request frees its blocks, keeps its tokens, and returns to the head of the queue."""

    kind: ClassVar[str] = "preempted"
    request: str
    num_lost_tokens: int


@dataclass(frozen=True, slots=True)
class Finished(Event):
    """A request has ended: `reason` is "stop", "length", "abort" or "error". `rest` is the end of
    its text, where no event's `pieces` contain it."""

    kind: ClassVar[str] = "finished"
    time: float
    request: str
    reason: str
    stop_reason: int | str | None = None
    detail: str | None = None
    rest: str = ""


@dataclass(frozen=True, slots=True)
class Cut(Event):
    """A request ends at a stop string, which overrides any other reason: its text is cut to the
    first `text_length` characters."""

    kind: ClassVar[str] = "cut"
    request: str
    stop_string: str
    text_length: int


# -- blocks


@dataclass(frozen=True, slots=True)
class Taken(Event):
    """Blocks allocated from the front of the free list, in this order, with one reference each."""

    kind: ClassVar[str] = "taken"
    request: str | None
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class Shared(Event):
    """Each of these cached blocks gains one reference, possibly its first."""

    kind: ClassVar[str] = "shared"
    request: str | None
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class Freed(Event):
    """Each block loses one reference. Blocks without references become free, in this order."""

    kind: ClassVar[str] = "freed"
    request: str | None
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class Table(Event):
    """The request's block table is now its first `keep` entries, followed by `blocks`. 0 is an
    entry that was released, because no future token attends to it."""

    kind: ClassVar[str] = "table"
    request: str
    keep: int
    blocks: list[int]
    group: int = 0


# -- the prefix cache


@dataclass(frozen=True, slots=True)
class Matched(Event):
    """Cached prefix found by a look-up: its blocks, first one first, count as just used. A look-up
    that finds nothing writes no event. With groups there is one event per group, and `blocks` are
    the end of the prefix: the window does not reach the blocks before them."""

    kind: ClassVar[str] = "matched"
    request: str | None
    blocks: list[int]
    group: int = 0


@dataclass(frozen=True, slots=True)
class Published(Event):
    """A request's blocks from index `start` on were offered to the cache. Where `kept[i]` is
    `given[i]`, the cache now holds that block, with one more reference. Otherwise `kept[i]` is a
    cached block with the same content: it gains one reference, and the given block is freed.

    `hashes`: with a hash chain, the first digits of the kept blocks' hashes. `node_heads`: with a
    radix tree, the blocks that begin a node."""

    kind: ClassVar[str] = "published"
    request: str
    start: int
    given: list[int]
    kept: list[int]
    hashes: list[str] = field(default_factory=list)
    node_heads: list[int] = field(default_factory=list)
    group: int = 0


@dataclass(frozen=True, slots=True)
class Split(Event):
    """A node of the radix tree was split: this block now begins a node."""

    kind: ClassVar[str] = "split"
    block: int


@dataclass(frozen=True, slots=True)
class Evicted(Event):
    """The cache released these blocks, children first. They become free, in this order, except
    blocks that a request still holds: these were invalidated because a request with them ended in
    an error. With groups: the blocks were allocated again, so their content is no longer cached."""

    kind: ClassVar[str] = "evicted"
    blocks: list[int]


# -- KV from elsewhere


@dataclass(frozen=True, slots=True)
class LoadBegun(Event):
    """KV of a waiting request is being loaded into `blocks`, which follow the cached `prefix`,
    which is pinned."""

    kind: ClassVar[str] = "load_begun"
    request: str
    prefix: list[int]
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class Loaded(Event):
    """The loaded KV has arrived and is cached: `blocks` replace those of `load_begun`. `sources`
    counts blocks by tier: "host", "disk", or "store" for a source that is not a tier."""

    kind: ClassVar[str] = "loaded"
    request: str
    blocks: list[int]
    sources: dict[str, int]


@dataclass(frozen=True, slots=True)
class LoadEnded(Event):
    """A load no longer holds blocks: its request was admitted or ended, or the load was dropped to
    free blocks for others."""

    kind: ClassVar[str] = "load_ended"
    request: str


# -- steps


@dataclass(frozen=True, slots=True)
class Planned(Event):
    """A step computes `num_tokens[i]` tokens of `requests[i]` from position `starts[i]` on. If the
    request has `drafts`, the last of these tokens are its draft tokens.

    `passed_over` maps skipped requests to the reason, `parents` those with the reason "parent" to
    the request they wait for. `stop` is the reason for all others and the request at which it arose
    ("": no request was considered); None: all requests were considered."""

    kind: ClassVar[str] = "planned"
    step: int
    time: float  # when planning began
    schedule_ms: float
    requests: list[str]
    starts: list[int]
    num_tokens: list[int]
    drafts: dict[str, list[int]] = field(default_factory=dict)
    passed_over: dict[str, str] = field(default_factory=dict)
    parents: dict[str, str] = field(default_factory=dict)
    stop: list[str] | None = None


@dataclass(frozen=True, slots=True)
class Computed(Event):
    """Results of a step, by request. `tokens` are new tokens, `pieces` the text that each adds.
    `verified` counts the accepted and the rejected draft tokens. `discarded` are tokens of requests
    that had already ended."""

    kind: ClassVar[str] = "computed"
    step: int
    time: float  # when the results reached the host
    times: dict[str, float]  # `{part}_ms`: prepare, forward, sample, propose
    tokens: dict[str, list[int]]
    pieces: dict[str, list[str]] = field(default_factory=dict)
    verified: dict[str, list[int]] = field(default_factory=dict)
    discarded: dict[str, list[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Updated(Event):
    """End of a step."""

    kind: ClassVar[str] = "updated"
    step: int
    time: float
    update_ms: float


@dataclass(frozen=True, slots=True)
class Failed(Event):
    """A step raised. Steps in flight have no results; running requests are aborted next."""

    kind: ClassVar[str] = "failed"
    time: float
    error: str


@dataclass(frozen=True, slots=True)
class Snapshot(Event):
    """The complete state at the moment when watching begins in the middle of a run, as rows with
    named fields. The holders of a block follow from tables, cache and loads.

    `requests`, in the order of arrival: "request", "prompt", "prompt_pieces", "max_tokens",
    "priority", "tenant", "order_key", "adapter", "grammar", "arrived_at", "outputs", "pieces",
    "table", "num_computed_tokens", "num_cached_tokens", "num_preemptions", "highest" (the position
    up to which it was ever computed), "tables" of the groups after the first. `cached`, with unused
    blocks in the order of eviction: "block", "parent" (a block or null), "tokens", "tenant",
    "hash"; with groups "group", "place" (index in tables), an empty tenant, and a null parent,
    since the parent may no longer be cached. `loads`: "request", "prefix", "blocks", "has_arrived".
    `under_way`, the oldest first: "step", "requests", "starts", "num_tokens", "drafts" of each
    plan, without requests that have ended since."""

    kind: ClassVar[str] = "snapshot"
    time: float
    requests: list[dict[str, Any]]
    waiting: list[str]
    running: list[str]
    free: list[int]
    cached: list[dict[str, Any]] = field(default_factory=list)
    node_heads: list[int] = field(default_factory=list)
    loads: list[dict[str, Any]] = field(default_factory=list)
    loaded: dict[str, int] = field(default_factory=dict)  # blocks so far, by source
    under_way: list[dict[str, Any]] = field(default_factory=list)


KINDS: dict[str, type[Event]] = {kind.kind: kind for kind in Event.__subclasses__()}
_NAMES = {kind: tuple(f.name for f in fields(kind)) for kind in KINDS.values()}
_HINTS = {kind: get_type_hints(kind, vars(sys.modules[__name__])) for kind in KINDS.values()}
_OPTIONAL = {
    kind: {
        f.name for f in fields(kind) if f.default is not MISSING or f.default_factory is not MISSING
    }
    for kind in KINDS.values()
}
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def to_line(event: Event) -> str:
    """Return the event as JSON without a line break. Empty optional fields are left out."""
    kind = type(event)
    optional, line = _OPTIONAL[kind], {"kind": kind.kind}
    for name in _NAMES[kind]:
        value = getattr(event, name)
        if value or name not in optional:
            line[name] = value
    return _encode(line)


def from_line(line: str) -> Event:
    """Parse one line. Raises `ValueError` that describes the first fault if the line is not an
    event of this version."""
    try:
        values = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"must be JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"must be a JSON object, got {line[:40]!r}")
    name = values.pop("kind", None)
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ValueError(f"must be of kind {', '.join(KINDS)}, got {name!r}")
    if kind is Run and values.get("version") != VERSION:
        version = values.get("version")
        raise ValueError(f"must be of version {VERSION}, got {version!r}")
    names, optional = _NAMES[kind], _OPTIONAL[kind]
    for missing in (n for n in names if n not in values and n not in optional):
        raise ValueError(f"of kind {name!r} must have {missing!r}")
    for field_name, value in values.items():
        if field_name not in names:
            raise ValueError(f"of kind {name!r} may have {', '.join(names)}, got {field_name!r}")
        if not _fits(value, _HINTS[kind][field_name]):
            raise ValueError(f"of kind {name!r}: {field_name} has the wrong type, got {value!r}")
    return kind(**values)


def _fits(value: Any, hint: Any) -> bool:
    if hint is Any:
        return True
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (UnionType, Union):
        return any(_fits(value, one) for one in arguments)
    if origin is list:
        return isinstance(value, list) and all(_fits(item, arguments[0]) for item in value)
    if origin is dict:
        is_right: Callable[[Any], bool] = lambda item: _fits(item, arguments[1])  # noqa: E731
        return isinstance(value, dict) and all(map(is_right, value.values()))
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return value is None if hint is NoneType else isinstance(value, hint)


def read_events(path: str | Path) -> Iterator[Event]:
    """Yield the events of a file, its `run` line first. A last line that a crash cut is left out.
    Raises `FileNotFoundError`, and `ValueError` with the line number for an unreadable line."""
    path = Path(path)
    # A crash can cut a character; text after the last line break is not read.
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        yield from parse_events(file, path.name)


def parse_events(lines: Iterable[str], name: str = "events") -> Iterator[Event]:
    """Yield the events of `lines`, which include their line breaks; otherwise as `read_events`."""
    is_there = False
    for number, line in enumerate(lines, 1):
        if not line.endswith("\n"):
            break  # a crash cut this line
        try:
            event = from_line(line)
        except ValueError as error:
            raise ValueError(f"{name}, line {number}: the event {error}") from None
        if isinstance(event, Run) != (number == 1):
            raise ValueError(f"{name}, line {number}: only the first line must be the run line")
        is_there = True
        yield event
    if not is_there:
        raise ValueError(f"{name} must begin with the run line")
