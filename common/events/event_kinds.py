"""What can happen to an engine, as data: one frozen class a kind, one JSON object a line.

    {"kind":"taken","request":"a","blocks":[1,2]}       kind names the class, the rest its fields

A file is a `run` line and then events in the order in which they happened. Of a step there are

    taken, admitted, ...  planned        what its planning did, and the plan
    computed                             what came of it
    finished, freed, ...  updated        what that led to, and the end of the step

Arrivals and aborts stand between steps. Where steps overlap, `planned` of step n + 1 stands before
`computed` of step n.

Field types are the documentation and are checked when a line is read. Times are seconds since the
`run` line, durations are milliseconds. This module needs nothing but Python's standard library.

A change that an old reader would misunderstand raises `VERSION`. Chrome's trace format and vLLM's
KV cache events were read first; neither has reasons, queues or tokens."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Union, get_args, get_origin, get_type_hints

VERSION = 1

# Why a waiting request did not run. One that was passed over has a reason of its own, all behind
# the one at whom admission stopped share that one's.
REASONS = {
    "budget": "the tokens of this step were spent",
    "blocks": "the KV memory had no room, or was kept for those who run",
    "preempting": "a step that preempts admits nobody",
    "seat": "as many run as may (max_num_seqs)",
    "constraint": "a rule held it back: a static batch, too many long prompts, an adapter",
    "parent": "another request computes the very block that it could share",
    "remote_kv": "its KV is on its way from a tier or a store",
    "grammar": "its grammar is being compiled",
    "pending": "a token of it was still under way when it was preempted",
    "turn": "it was the turn of those who decode",
    "enough": "so many were passed over before it that nobody else was asked",
}


@dataclass(frozen=True, slots=True)
class Event:
    """Something happened."""

    kind: ClassVar[str]


@dataclass(frozen=True, slots=True)
class Run(Event):
    """The first line: what ran, and with what. `config` holds the engine's settings by name.

    With `windows` a request has a table for each of them (0 sees everything), and the
    cache holds nothing: what nobody holds is free, and known until it is taken."""

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
    overlaps: bool  # two steps may be under way
    config: dict[str, Any]
    model: dict[str, Any]
    versions: dict[str, str]
    windows: list[int] = field(default_factory=list)  # of its layers' groups, if any has one


# -- requests


@dataclass(frozen=True, slots=True)
class Arrived(Event):
    """A request waits now, behind all others. `pieces[i]` is what `prompt[i]` adds to the text;
    empty without a tokenizer. `tenant` tells cache salts apart, and is no salt. `order_key` is what
    the policy sorts by, as text. `adapter` is the name of its own, `grammar` the kind: "json"."""

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
    """The waiting requests stand in this order now, and not in that of arrival."""

    kind: ClassVar[str] = "queue"
    order: list[str]


@dataclass(frozen=True, slots=True)
class Admitted(Event):
    """It runs. Its first `num_cached_tokens` tokens were found; for a preempted one it is the
    return."""

    kind: ClassVar[str] = "admitted"
    request: str
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Preempted(Event):
    """It gives up its memory, keeps its tokens, and waits in front."""

    kind: ClassVar[str] = "preempted"
    request: str
    num_lost_tokens: int


@dataclass(frozen=True, slots=True)
class Finished(Event):
    """It has ended: `reason` is "stop", "length", "abort" or "error". `rest` is the end of a text
    that stands in no piece."""

    kind: ClassVar[str] = "finished"
    time: float
    request: str
    reason: str
    stop_reason: int | str | None = None
    detail: str | None = None
    rest: str = ""


@dataclass(frozen=True, slots=True)
class Cut(Event):
    """The end of a request is a stop string, which counts more than any other reason: its text is
    the first `text_length` characters."""

    kind: ClassVar[str] = "cut"
    request: str
    stop_string: str
    text_length: int


# -- blocks


@dataclass(frozen=True, slots=True)
class Taken(Event):
    """These blocks left the front of the free order, in this order, with one reference each."""

    kind: ClassVar[str] = "taken"
    request: str | None
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class Shared(Event):
    """One reference more for each of these cached blocks, be it the first."""

    kind: ClassVar[str] = "shared"
    request: str | None
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class Freed(Event):
    """One reference less for each. Those without any are free, in this order."""

    kind: ClassVar[str] = "freed"
    request: str | None
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class Table(Event):
    """The request's block table is its first `keep` entries, and these behind them. 0 is an entry
    that was given up, since no token to come sees it."""

    kind: ClassVar[str] = "table"
    request: str
    keep: int
    blocks: list[int]
    group: int = 0


# -- the prefix cache


@dataclass(frozen=True, slots=True)
class Matched(Event):
    """The longest cached prefix of a request was looked up: these blocks, head first, are used
    now. A look-up that finds nothing leaves no trace. With groups it is noted for each of them, and
    `blocks` stand at the end of the prefix: what is in front of them nobody sees."""

    kind: ClassVar[str] = "matched"
    request: str | None
    blocks: list[int]
    group: int = 0


@dataclass(frozen=True, slots=True)
class Published(Event):
    """The cache was given a request's blocks `start` and on. Where `kept[i]` is `given[i]`, the
    cache holds it from now on, with one reference more; another is a block that held the same
    already: it has one reference more, and the given one is free.

    `hashes` are the first digits of the kept blocks' hashes, with a hash chain. `node_heads` are
    those that begin a node, with a radix tree."""

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
    """A node of the radix tree was cut in two: from now on this block begins a node."""

    kind: ClassVar[str] = "split"
    block: int


@dataclass(frozen=True, slots=True)
class Evicted(Event):
    """The cache gave these blocks up, and they are free, in this order, but for those that somebody
    holds: they were withdrawn, since a request with them ended in an error. Children come first.
    With groups: what was in them is not known any more, since somebody has taken them."""

    kind: ClassVar[str] = "evicted"
    blocks: list[int]


# -- KV from elsewhere


@dataclass(frozen=True, slots=True)
class LoadBegun(Event):
    """KV of a waiting request comes into `blocks`, behind the cached `prefix`, which is held."""

    kind: ClassVar[str] = "load_begun"
    request: str
    prefix: list[int]
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class Loaded(Event):
    """It is there, and cached: `blocks` replace those of `load_begun`. `sources` are blocks by
    tier: "host", "disk", or "store" for what is no tier."""

    kind: ClassVar[str] = "loaded"
    request: str
    blocks: list[int]
    sources: dict[str, int]


@dataclass(frozen=True, slots=True)
class LoadEnded(Event):
    """Nothing is held for it any more: it was admitted, has ended, or made way."""

    kind: ClassVar[str] = "load_ended"
    request: str


# -- steps


@dataclass(frozen=True, slots=True)
class Planned(Event):
    """A step computes `num_tokens[i]` tokens of `requests[i]` from position `starts[i]` on. The
    last of them are its guesses, if it has `drafts`.

    `passed_over` says why those who were asked and not taken must wait, `parents` for whom those
    with the reason "parent" do. `stop` is the reason for all others, and the request at whom it
    came up ("": nobody was asked); None: all were asked."""

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
    """What came of a step. `tokens` are a request's new tokens, `pieces` what each adds to the
    text. `verified` has, of a request's guesses, how many were accepted and rejected. `discarded`
    are tokens of who had ended before."""

    kind: ClassVar[str] = "computed"
    step: int
    time: float  # when the host had it
    times: dict[str, float]  # `{part}_ms`: prepare, forward, sample, propose
    tokens: dict[str, list[int]]
    pieces: dict[str, list[str]] = field(default_factory=dict)
    verified: dict[str, list[int]] = field(default_factory=dict)
    discarded: dict[str, list[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Updated(Event):
    """A step is over."""

    kind: ClassVar[str] = "updated"
    step: int
    time: float
    update_ms: float


@dataclass(frozen=True, slots=True)
class Failed(Event):
    """A step raised. Nothing comes of the steps under way; who ran is aborted next."""

    kind: ClassVar[str] = "failed"
    time: float
    error: str


@dataclass(frozen=True, slots=True)
class Snapshot(Event):
    """Watching begins in the middle of a run: all that is there, as rows with names. What a block's
    holders are follows from it: tables, the cache, and loads.

    `requests`, in the order of arrival: "request", "prompt", "prompt_pieces", "max_tokens",
    "priority", "tenant", "order_key", "adapter", "grammar", "arrived_at", "outputs", "pieces",
    "table", "num_computed_tokens", "num_cached_tokens", "num_preemptions", "highest" (the position
    up to which it was ever computed), "tables" of the groups behind the first. `cached`, with those
    that nobody uses in the order of eviction: "block", "parent" (a block or null), "tokens",
    "tenant", "hash"; with groups "group", "place" (its index in tables), no tenant, and no parent,
    which may be gone. `loads`: "request",
    "prefix", "blocks", "has_arrived". `under_way`, the oldest first: "step", "requests", "starts",
    "num_tokens", "drafts" of each plan, without those who have ended since."""

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
    """JSON without a line break. Fields that are empty and may be are left out."""
    kind = type(event)
    optional, line = _OPTIONAL[kind], {"kind": kind.kind}
    for name in _NAMES[kind]:
        value = getattr(event, name)
        if value or name not in optional:
            line[name] = value
    return _encode(line)


def from_line(line: str) -> Event:
    """Raises `ValueError` with a sentence for what is no event of this version."""
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
    """The events of a file, its `run` line first. A last line that a crash has cut is left out.
    Raises `FileNotFoundError`, and `ValueError` that names the line, for what can not be read."""
    path = Path(path)
    # A crash may cut a character; what is behind the last line break is not read.
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        yield from parse_events(file, path.name)


def parse_events(lines: Iterable[str], name: str = "events") -> Iterator[Event]:
    """The same of lines with their breaks."""
    is_there = False
    for number, line in enumerate(lines, 1):
        if not line.endswith("\n"):
            break  # the crash came while it was written
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
