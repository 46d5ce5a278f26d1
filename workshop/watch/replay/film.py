"""The film of a run: the engine's state after any step, from its events alone.

    film = Film.read("run.jsonl")
    for step in film.steps(): ...           the plan, its result, and the events in between
    film.state_after(12).requests["a"]      replayed from the start, or from the last position

`State.apply` does all the work: one method for each kind of event, each a few lines. This module
does not depend on an engine: no chapter and no tensor is imported. The assumptions about an engine
are in `event_kinds.py`, and `test_film.py` compares the state with real engines after every step.

An event that contradicts the events before it raises `ValueError`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.events.event_kinds import (
    Admitted,
    Arrived,
    Computed,
    Cut,
    Event,
    Evicted,
    Failed,
    Finished,
    Freed,
    LoadBegun,
    Loaded,
    LoadEnded,
    Matched,
    Planned,
    Preempted,
    Published,
    Queue,
    Run,
    Shared,
    Snapshot,
    Split,
    Table,
    Taken,
    Updated,
    read_events,
)


@dataclass(slots=True)
class RequestState:
    """A request's current state. Kept after the request has finished."""

    request_id: str
    prompt: list[int]
    prompt_pieces: list[str]
    max_tokens: int
    priority: int
    tenant: str
    arrived_at: float
    adapter: str = ""  # its name
    grammar: str = ""  # its kind
    outputs: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    tables: list[list[int]] = field(default_factory=lambda: [[]])  # of each group of layers
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # at its first admission
    num_preemptions: int = 0
    highest: int = 0  # position up to which it was ever computed
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    detail: str | None = None
    rest: str = ""
    text_length: int | None = None
    finished_at: float | None = None

    @property
    def table(self) -> list[int]:
        """The block table of the first group; most models have no other group."""
        return self.tables[0]

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.outputs

    @property
    def text(self) -> str:
        """The output text so far."""
        return ("".join(self.pieces) + self.rest)[: self.text_length]


@dataclass(frozen=True, slots=True)
class CachedBlockState:
    """The content of a cached block and its `parent` block. With groups, the parent can be evicted,
    and only the block's `place` in tables is known."""

    tokens: tuple[int, ...]
    parent: int | None
    tenant: str
    block_hash: str
    group: int = 0
    place: int | None = None


@dataclass(slots=True)
class LoadState:
    prefix: list[int]
    blocks: list[int]
    has_arrived: bool = False


@dataclass(frozen=True, slots=True)
class Cell:
    """Tokens `[start, start + num_tokens)` of a request that a step computes. `kind` is "prompt",
    "recomputed" (lost by a preemption), "decode", or `"draft"` (a draft token)."""

    request: str
    kind: str
    start: int
    num_tokens: int


class State:
    """An engine's state. `ref_cnt[b]` is the number of requests that hold block b; `free` lists the
    free blocks in order."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.cache_refs = 0 if run.windows else 1  # that the cache has on each of its blocks
        self.requests: dict[str, RequestState] = {}
        self.waiting: list[str] = []  # in the order of service
        self.running: dict[str, None] = {}  # in order of admission
        self.ref_cnt = [0] * run.num_blocks
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, run.num_blocks))
        self.cached: dict[int, CachedBlockState] = {}
        self.node_heads: set[int] = set()  # with a radix tree: blocks that begin a node
        self.last_match: Matched | None = None
        self.loads: dict[str, LoadState] = {}
        self.num_loaded: dict[str, int] = {}  # blocks, by source
        self.under_way: list[Planned] = []
        self._planned_for: list[list[RequestState]] = []  # the requests of each plan in flight
        self.last_planned: Planned | None = None
        self.num_steps = 0  # finished steps
        self.errors: list[str] = []
        self._last_use: dict[int, int] = {}  # of cached blocks: when they became unused
        self._clock = 0

    def apply(self, event: Event) -> None:
        """Apply an event. Raises `ValueError` if it contradicts this state."""
        getattr(self, f"_on_{event.kind}")(event)

    # -- questions

    def request(self, request_id: str) -> RequestState:
        self._require(request_id in self.requests, f"request {request_id!r} has never arrived")
        return self.requests[request_id]

    def reason_to_wait(self, request_id: str) -> str | None:
        """Why a waiting request did not run in the last planned step, one of `REASONS`; None if it
        runs, has finished, or had not arrived."""
        planned = self.last_planned
        if planned is None or request_id not in self.waiting:
            return None
        if request_id in planned.passed_over:
            return planned.passed_over[request_id]
        return None if planned.stop is None else planned.stop[0]

    def eviction_order(self) -> list[int]:
        """Cached blocks that no request uses, the next one to be evicted first."""
        if not self.cache_refs:
            return [block for block in self.free if block in self.cached]
        idle = (block for block in self.cached if self.ref_cnt[block] == 1)
        return sorted(idle, key=self._last_use.__getitem__)

    def prefix_of(self, block: int) -> tuple[int, ...]:
        """All tokens that a cached block depends on, its own last."""
        parts: list[tuple[int, ...]] = []
        place: int | None = block
        while place is not None:
            parts.append(self.cached[place].tokens)
            place = self.cached[place].parent
        return tuple(token for part in reversed(parts) for token in part)

    def nodes(self) -> list[list[int]]:
        """The blocks of each node of a radix tree, head first."""
        below = {
            cached.parent: block
            for block, cached in self.cached.items()
            if block not in self.node_heads
        }
        nodes = []
        for head in sorted(self.node_heads):
            node = [head]
            while (block := below.get(node[-1])) is not None:
                node.append(block)
            nodes.append(node)
        return nodes

    def users_of(self, block: int) -> list[str]:
        """The requests with this block in their tables."""
        requests = self.requests.items()
        return [name for name, request in requests if any(block in t for t in request.tables)]

    def cells(self, planned: Planned) -> Iterator[Cell]:
        """Split a plan by kinds of tokens. Call before or after the plan is applied, but before its
        result is applied."""
        for name, start, num in zip(planned.requests, planned.starts, planned.num_tokens):
            request = self.request(name)
            num_drafts = len(planned.drafts.get(name, ()))
            end = start + num - num_drafts
            bounds, first = (request.highest, len(request.prompt), end), start
            for kind, bound in zip(("recomputed", "prompt", "decode"), bounds):
                if (stop := min(max(bound, first), end)) > first:
                    yield Cell(name, kind, first, stop - first)
                    first = stop
            if num_drafts:
                yield Cell(name, "draft", end, num_drafts)

    # -- requests

    def _on_arrived(self, event: Arrived) -> None:
        name = event.request
        known = self.requests.get(name)
        is_new = known is None or known.finish_reason is not None
        self._require(is_new, f"request {name!r} arrived, and has not ended")
        self.requests.pop(name, None)
        self.requests[name] = RequestState(
            name,
            event.prompt,
            event.pieces,
            event.max_tokens,
            event.priority,
            event.tenant,
            event.time,
            event.adapter,
            event.grammar,
            tables=[[] for _ in self.run.windows or "1"],
        )
        self.waiting.append(name)

    def _on_queue(self, event: Queue) -> None:
        is_same = sorted(event.order) == sorted(self.waiting)
        self._require(is_same, f"the queue is {event.order}, and {self.waiting} wait")
        self.waiting = list(event.order)

    def _on_admitted(self, event: Admitted) -> None:
        name = event.request
        self._require(name in self.waiting, f"request {name!r} was admitted, and did not wait")
        self.waiting.remove(name)
        self.running[name] = None
        request = self.request(name)
        request.num_computed_tokens = event.num_cached_tokens
        if request.num_preemptions == 0:
            request.num_cached_tokens = event.num_cached_tokens

    def _on_preempted(self, event: Preempted) -> None:
        name = event.request
        self._require(name in self.running, f"request {name!r} was preempted, and did not run")
        del self.running[name]
        self.waiting.insert(0, name)
        request = self.request(name)
        computed, lost = request.num_computed_tokens, event.num_lost_tokens
        self._require(lost == computed, f"{name!r} lost {lost} tokens, and {computed} are computed")
        request.num_computed_tokens = 0
        request.num_preemptions += 1

    def _on_finished(self, event: Finished) -> None:
        name, request = event.request, self.request(event.request)
        self._require(request.finish_reason is None, f"request {name!r} ended twice")
        request.finish_reason, request.stop_reason = event.reason, event.stop_reason
        request.detail, request.finished_at = event.detail, event.time
        request.rest = event.rest
        self.running.pop(name, None)
        if name in self.waiting:
            self.waiting.remove(name)

    def _on_cut(self, event: Cut) -> None:
        request = self.request(event.request)
        is_over = request.finish_reason is not None
        self._require(is_over, f"request {event.request!r} was cut, and goes on")
        request.finish_reason, request.stop_reason = "stop", event.stop_string
        request.text_length, request.detail = event.text_length, None

    # -- blocks

    def _on_taken(self, event: Taken) -> None:
        for block in event.blocks:
            first = next(iter(self.free), None)
            self._require(block == first, f"block {block} was taken, and {first} is the next")
            del self.free[block]
            self.ref_cnt[block] = 1

    def _on_shared(self, event: Shared) -> None:
        for block in event.blocks:
            self._hold(block)

    def _on_freed(self, event: Freed) -> None:
        for block in event.blocks:
            self._drop(block)
        for block in reversed(event.blocks):  # the deepest is evicted first
            if block in self.cached and self.ref_cnt[block] == 1:
                self._use(block)

    def _on_table(self, event: Table) -> None:
        table = self.request(event.request).tables[event.group]
        self._require(event.keep <= len(table), f"table of {event.request!r} is {table}: {event}")
        table[event.keep :] = event.blocks

    def _hold(self, block: int) -> None:
        is_known = not self.cache_refs and block in self.cached
        self._require(self.ref_cnt[block] > 0 or is_known, f"block {block} was shared, and is free")
        self.free.pop(block, None)
        self.ref_cnt[block] += 1

    def _drop(self, block: int) -> None:
        self._require(self.ref_cnt[block] > 0, f"block {block} was freed, and is free")
        self.ref_cnt[block] -= 1
        if self.ref_cnt[block] == 0:
            self.free[block] = None

    # -- the prefix cache

    def _on_matched(self, event: Matched) -> None:
        self.last_match = event
        for block in reversed(event.blocks):
            self._require(block in self.cached, f"block {block} was matched, and is not cached")
            if self.ref_cnt[block] == 1:
                self._use(block)

    def _use(self, block: int) -> None:
        self._clock += 1
        self._last_use[block] = self._clock

    def _on_published(self, event: Published) -> None:
        request, size = self.request(event.request), self.run.block_size
        load = self.loads.get(event.request)
        before = request.tables[event.group] if load is None else load.prefix
        parent = before[event.start - 1] if event.start and self.cache_refs else None
        hashes = event.hashes or [""] * len(event.kept)
        tokens = request.tokens
        for kept, given in zip(event.kept, event.given, strict=True):
            if kept != given:
                self._hold(kept)
        for index, (kept, given) in enumerate(zip(event.kept, event.given), event.start):
            if kept != given:
                self._require(kept in self.cached, f"block {kept} is not cached: {event}")
                self._drop(given)
            else:
                if self.cache_refs:
                    self._hold(given)
                content = tuple(tokens[index * size : (index + 1) * size])
                self._require(len(content) == size, f"block {given} is not full: {event}")
                name = hashes[index - event.start]
                group = {} if self.cache_refs else {"group": event.group, "place": index}
                self.cached[given] = CachedBlockState(
                    content, parent, request.tenant, name, **group
                )
                self._last_use[given] = 0
            parent = kept if self.cache_refs else None
        self.node_heads.update(event.node_heads)

    def _on_split(self, event: Split) -> None:
        self._require(event.block in self.cached, f"{event}: the block is not cached")
        self.node_heads.add(event.block)

    def _on_evicted(self, event: Evicted) -> None:
        for block in event.blocks:
            self._require(block in self.cached, f"block {block} was evicted, and is not cached")
            del self.cached[block], self._last_use[block]
            self.node_heads.discard(block)
            if self.cache_refs:
                self._drop(block)

    # -- KV from elsewhere

    def _on_load_begun(self, event: LoadBegun) -> None:
        self.loads[event.request] = LoadState(list(event.prefix), list(event.blocks))

    def _on_loaded(self, event: Loaded) -> None:
        self._require(event.request in self.loads, f"{event}: nothing was being loaded")
        load = self.loads[event.request]
        load.blocks, load.has_arrived = list(event.blocks), True
        for source, num in event.sources.items():
            self.num_loaded[source] = self.num_loaded.get(source, 0) + num

    def _on_load_ended(self, event: LoadEnded) -> None:
        self._require(event.request in self.loads, f"{event}: nothing was being loaded")
        del self.loads[event.request]

    # -- steps

    def _on_planned(self, event: Planned) -> None:
        for name, start, num in zip(event.requests, event.starts, event.num_tokens, strict=True):
            request, is_running = self.request(name), name in self.running
            self._require(is_running, f"step {event.step} computes {name!r}, which does not run")
            computed = request.num_computed_tokens
            is_next = start == computed
            self._require(is_next, f"{name!r} goes on at {start}, and {computed} are computed")
            request.num_computed_tokens = start + num
        self.under_way.append(event)
        self._planned_for.append([self.requests[name] for name in event.requests])
        self.last_planned = event

    def _on_computed(self, event: Computed) -> None:
        planned = self._oldest(event.step)
        requests = self._planned_for[0]  # a new request may have the name of one by now
        for request, start, num in zip(requests, planned.starts, planned.num_tokens):
            _, num_rejected = event.verified.get(request.request_id, (0, 0))
            request.highest = max(request.highest, start + num - num_rejected)
        for name, tokens in event.tokens.items():
            request = self.request(name)
            request.outputs += tokens
            request.pieces += event.pieces.get(name, [])
        for name, (_, num_rejected) in event.verified.items():
            self.request(name).num_computed_tokens -= num_rejected

    def _on_updated(self, event: Updated) -> None:
        self._oldest(event.step)
        del self.under_way[0], self._planned_for[0]
        self.num_steps += 1

    def _oldest(self, step: int) -> Planned:
        is_next = bool(self.under_way) and self.under_way[0].step == step
        self._require(is_next, f"step {step} was computed, and is not the oldest in flight")
        return self.under_way[0]

    def _on_failed(self, event: Failed) -> None:
        self.under_way.clear()
        self._planned_for.clear()
        self.errors.append(event.error)

    # -- a film that begins in the middle

    def _on_snapshot(self, event: Snapshot) -> None:
        self._require(not self.requests and not self.cached, "a snapshot behind other events")
        try:
            for row in event.requests:
                self._restore_request(**row)
            for row in event.cached:
                self._restore_cached(**row)
            for row in event.loads:
                load = LoadState(row["prefix"], row["blocks"], row["has_arrived"])
                self.loads[row["request"]] = load
            for row in event.under_way:
                self.under_way.append(Planned(time=event.time, schedule_ms=0.0, **row))
                self._planned_for.append([self.requests[name] for name in row["requests"]])
        except (KeyError, TypeError) as error:
            raise ValueError(f"a snapshot must have rows of its kind: {error}") from None
        self.waiting, self.running = list(event.waiting), dict.fromkeys(event.running)
        self.node_heads, self.num_loaded = set(event.node_heads), dict(event.loaded)
        self.free = OrderedDict.fromkeys(event.free)
        holders = [table for request in self.requests.values() for table in request.tables]
        holders += [list(self.cached)] * self.cache_refs
        holders += [load.prefix + load.blocks for load in self.loads.values()]
        for block in (block for blocks in holders for block in blocks if block):
            self.ref_cnt[block] += 1
        is_free = {b for b, ref_cnt in enumerate(self.ref_cnt) if b and not ref_cnt}
        self._require(is_free == set(event.free), "a block is free and held, or neither")

    def _restore_request(self, request: str, arrived_at: float, order_key: str, **row: Any) -> None:
        row |= {name: list(row[name]) for name in ("outputs", "pieces")}  # they grow
        row["tables"] = [list(table) for table in (row.pop("table"), *row.get("tables", ()))]
        self.requests[request] = RequestState(request_id=request, arrived_at=arrived_at, **row)

    def _restore_cached(self, block: int, tokens: list[int], hash: str, **row: Any) -> None:
        self.cached[block] = CachedBlockState(tuple(tokens), block_hash=hash, **row)
        self._use(block)

    def _on_run(self, event: Run) -> None:
        raise ValueError("the run line must be the only one")

    def _require(self, is_right: bool, otherwise: str) -> None:
        if not is_right:
            raise ValueError(f"the events contradict themselves: {otherwise}")


@dataclass(frozen=True, slots=True)
class StepEvents:
    """The events up to and including a step's last one (`Updated` or `Failed`). `number` counts
    ended steps, and is the step's number as long as no step has failed."""

    number: int
    first: int  # the number of events before these
    events: list[Event]

    @property
    def planned(self) -> list[Planned]:
        return [event for event in self.events if isinstance(event, Planned)]


class Film:
    """The events of a run."""

    def __init__(self, events: Iterable[Event]) -> None:
        first, *self.events = events
        if not isinstance(first, Run):
            raise ValueError(f"the first event must be the run line, got {first!r}")
        self.run = first
        self._state, self._position = State(first), 0
        self._ends = [
            position
            for position, event in enumerate(self.events, 1)
            if isinstance(event, Updated | Failed)
        ]

    @classmethod
    def read(cls, path: str | Path) -> Film:
        """Read a film from a file. Raises the errors of `read_events`."""
        return cls(read_events(path))

    @property
    def num_steps(self) -> int:
        """The number of steps that ended, also by an error."""
        return len(self._ends)

    def steps(self) -> Iterator[StepEvents]:
        start = 0
        for step, end in enumerate(self._ends):
            yield StepEvents(step, start, self.events[start:end])
            start = end

    def state_after(self, step: int) -> State:
        """The state after a step, counted from 0; -1: before the first. A live object: the next
        call changes it. Raises `ValueError` for a step that does not exist."""
        if not -1 <= step < self.num_steps:
            raise ValueError(f"step must be from 0 to {self.num_steps - 1}, got {step}")
        return self.state_behind(self._ends[step] if step >= 0 else 0)

    def last_state(self) -> State:
        """The state after the last event."""
        return self.state_behind(len(self.events))

    def state_behind(self, position: int) -> State:
        """The state after `position` events. A live object, too."""
        if position < self._position:
            self._state, self._position = State(self.run), 0
        while self._position < position:
            self._state.apply(self.events[self._position])
            self._position += 1
        return self._state
