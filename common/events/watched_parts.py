"""The parts of an engine, seen: for each a class that is mixed in front of it and notes what it
does. Assembly asks `Watch` for these instead of the plain classes if events are on, and imports
this module only then; an engine without events has no line of it, and no branch.

    BlockPool             SeenPool        blocks taken, shared, freed
    PrefixCacheLocal      SeenIndex       look-ups, publications, evictions
    RadixCache            SeenTreeIndex   and the cuts of its tree
    KVMemory and kinds    SeenMemory      tables, and on whose behalf the pool is asked
    KVLoads               SeenLoads       KV that comes from elsewhere
    schedulers            SeenBooks       arrivals, plans and their reasons, results, ends
    the loop              SeenLoop        failures; writes the file after each step

Nothing here changes what a part does: each method calls the part's own, and looks."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from block_pool import Block, BlockPool
from common.events.event_kinds import (
    Admitted,
    Arrived,
    Computed,
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
    Shared,
    Split,
    Table,
    Taken,
    Updated,
)
from common.events.event_log import EventLog, TextPieces, describe_run, label_of
from engine_core import EngineCore
from kv_memory import ComputedBlocks, NotReady
from prefix_cache import extra_keys_of, normalise_extra_keys
from request import Request, RequestStatus
from scheduler_interface import EngineCoreOutput, SchedulerOutput, StepOutput

if TYPE_CHECKING:
    from common.engine_config import EngineConfig
    from common.model_config import ModelFacts
    from common.outputs import OutputProcessor

_STOPS = {"admitted": "seat", "passed over": "enough"}  # what a plan says otherwise than `REASONS`


class Watch:
    """Gives a part's class its seen kind. `who` is the request for whom parts are at work now."""

    def __init__(self, log: EventLog, members: Mapping[str, OutputProcessor]) -> None:
        self.log = log
        self.texts = TextPieces(members)
        self.who: str | None = None
        self.refused: str | None = None  # whom the memory refused last
        self.passed_over: dict[str, str] = {}  # in the step that is being planned
        self.parents: dict[str, str] = {}

    def __call__(self, kind: type) -> type:
        """The class to use instead of `kind`."""
        return type(f"Seen{kind.__name__}", (_seen_kind_of(kind), kind), {"watch": self})

    @contextmanager
    def acting_for(self, request_id: str) -> Iterator[None]:
        before, self.who = self.who, request_id
        try:
            yield
        finally:
            self.who = before


def watch_run(
    config: EngineConfig,
    facts: ModelFacts,
    num_blocks: int,
    overlaps: bool,
    members: Mapping[str, OutputProcessor],
) -> Watch:
    """Begin the file that `config.events` names. Raises `ValueError` or `FileNotFoundError` if that
    is no place for one."""
    assert config.events is not None
    log = EventLog(config.events)
    log.note(describe_run(config, facts, num_blocks, overlaps))
    return Watch(log, members)


def _seen_kind_of(kind: type) -> type:
    """By what a class can do, so that none is imported that was not chosen."""
    if issubclass(kind, BlockPool):
        return SeenPool
    if issubclass(kind, EngineCore):
        return SeenLoop
    for method, seen in (
        ("cut_out", SeenTree),
        ("_pop_oldest_leaf", SeenTreeIndex),
        ("match_prefix", SeenIndex),
        ("give_way", SeenLoads),
        ("wait_for_loads", SeenLoadingMemory),
        ("allocate_slots", SeenMemory),
        ("look_up", SeenBaseBooks),
        ("schedule", SeenFCFSBooks),
    ):
        if hasattr(kind, method):
            return seen
    raise TypeError(f"nobody knows how to watch a {kind.__name__}")


def _ids(blocks: Sequence[Any]) -> list[int]:
    return [block.block_id for block in blocks]


if TYPE_CHECKING:
    _Part = Any
else:
    _Part = object


# -- memory


class SeenPool(_Part):
    """`is_told` is off while the cache is at work that has an event of its own."""

    watch: Watch
    is_told = True
    is_evicting = False

    def allocate(self, num_blocks: int) -> list[Block] | None:
        blocks = super().allocate(num_blocks)
        if blocks is not None:
            self.watch.log.note(Taken(self.watch.who, _ids(blocks)))
        return blocks

    def touch(self, blocks: Sequence[Block]) -> None:
        super().touch(blocks)
        if self.is_told and blocks:
            self.watch.log.note(Shared(self.watch.who, _ids(blocks)))

    def free(self, blocks: Sequence[Block]) -> None:
        super().free(blocks)
        if self.is_evicting and blocks:
            self.watch.log.note(Evicted(_ids(blocks)))
        elif self.is_told and blocks:
            self.watch.log.note(Freed(self.watch.who, _ids(blocks)))


class SeenIndex(_Part):
    """A prefix cache."""

    watch: Watch

    def match_prefix(self, *arguments: Any, **keywords: Any) -> Any:
        match = super().match_prefix(*arguments, **keywords)
        if match.blocks:
            self.watch.log.note(Matched(self.watch.who, _ids(match.blocks)))
        return match

    def insert(self, token_ids: Any, blocks: Any, *arguments: Any, **keywords: Any) -> Any:
        given, pool = _ids(blocks), self.pool
        pool.is_told = False
        try:
            result = super().insert(token_ids, blocks, *arguments, **keywords)
        finally:
            pool.is_told = True
        if given:
            kept, names = _ids(result.blocks), self._names(result.blocks, result.owned)
            start, who = keywords.get("start", 0), self.watch.who or ""
            self.watch.log.note(Published(who, start, given, kept, **names))
        return result

    def _names(self, blocks: Sequence[Block], owned: Sequence[Block]) -> dict[str, Any]:
        """What the index calls them."""
        hashes = [self._by_block_id[block.block_id].block_hash.hex()[:8] for block in blocks]
        return {"hashes": hashes}

    def evict(self, num_blocks: int) -> int:
        self.pool.is_evicting = True
        try:
            return super().evict(num_blocks)
        finally:
            self.pool.is_evicting = False

    def withdraw(self, block: Any) -> None:
        self.pool.is_evicting = True
        try:
            super().withdraw(block)
        finally:
            self.pool.is_evicting = False


class SeenTreeIndex(SeenIndex):
    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.tree = self.watch(type(self.tree))(self.page_size)
        self._by_block_id = self.tree.node_of

    def _names(self, blocks: Sequence[Block], owned: Sequence[Block]) -> dict[str, Any]:
        node_of = self.tree.node_of
        heads = [b.block_id for b in owned if node_of[b.block_id].blocks[0] is b]
        return {"node_heads": heads}


class SeenTree(_Part):
    watch: Watch

    def cut(self, node: Any, page: int) -> Any:
        upper = super().cut(node, page)
        if upper is not node:  # which is the lower part now
            self.watch.log.note(Split(node.blocks[0].block_id))
        return upper


class SeenMemory(_Part):
    """A manager of block tables, of any kind."""

    watch: Watch

    def get_computed_blocks(self, request: Request, *arguments: Any) -> ComputedBlocks | NotReady:
        request_id, watch = request.request_id, self.watch
        with watch.acting_for(request_id):
            computed = super().get_computed_blocks(request, *arguments)
            if computed is NotReady.LOADING:
                watch.passed_over[request_id] = "remote_kv"
            elif computed is NotReady.COMPUTED_NOW:
                watch.passed_over[request_id] = "parent"
                watch.parents[request_id] = self._in_flight[self._asked_for]
        return computed

    def _key(self, *arguments: Any) -> Any:
        self._asked_for = super()._key(*arguments)
        return self._asked_for

    def find_cached_blocks(self, request: Request) -> Sequence[int]:
        with self.watch.acting_for(request.request_id):
            return super().find_cached_blocks(request)

    def allocate_slots(self, request: Request, *arguments: Any, **keywords: Any) -> bool:
        request_id, watch = request.request_id, self.watch
        num_before = len(self.get_block_ids(request_id))
        with watch.acting_for(request_id):
            has_room = super().allocate_slots(request, *arguments, **keywords)
        if not has_room:
            watch.refused = request_id
        else:
            block_ids = self.get_block_ids(request_id)
            if len(block_ids) > num_before:
                watch.log.note(Table(request_id, num_before, list(block_ids[num_before:])))
        return has_room

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        request_id = request.request_id
        before = list(self.get_block_ids(request_id))
        with self.watch.acting_for(request_id):
            super().cache_blocks(request, num_computed_tokens)
        after = self.get_block_ids(request_id)
        for keep, (old, new) in enumerate(zip(before, after, strict=True)):
            if old != new:
                self.watch.log.note(Table(request_id, keep, list(after[keep:])))
                break

    def free(self, request: Request) -> None:
        request_id = request.request_id
        had_table = bool(self.get_block_ids(request_id))
        with self.watch.acting_for(request_id):
            super().free(request)
        if had_table:
            self.watch.log.note(Table(request_id, 0, []))


class SeenLoadingMemory(SeenMemory):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        seen = self.watch(type(self._loads))
        self._loads = seen(self.connector, self.cache, self._take_blocks_to_load)


class SeenLoads(_Part):
    """KV on its way to requests that wait."""

    watch: Watch

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._begun: set[str] = set()

    def start(self, request: Request, computed: ComputedBlocks) -> bool:
        is_there = super().start(request, computed)
        if (load := self._loads.get(request.request_id)) is not None:
            self._note_begun(load)
        return is_there

    def _note_begun(self, load: Any) -> None:
        request_id = load.request.request_id
        if request_id not in self._begun:
            self._begun.add(request_id)
            self.watch.log.note(LoadBegun(request_id, _ids(load.prefix), _ids(load.blocks)))

    def _has_arrived(self, load: Any) -> bool:
        self._note_begun(load)
        if load.has_arrived:
            return True
        hits = self._hits_by_tier()
        with self.watch.acting_for(load.request.request_id):
            has_arrived = super()._has_arrived(load)
        if has_arrived:
            sources = {name: n - hits[name] for name, n in self._hits_by_tier().items()}
            sources = {name: n for name, n in sources.items() if n}
            sources = sources or ({"store": len(load.blocks)} if load.blocks else {})
            self.watch.log.note(Loaded(load.request.request_id, _ids(load.blocks), sources))
        return has_arrived

    def _hits_by_tier(self) -> dict[str, int]:
        hits = {"host": 0, "disk": 0}
        for part in getattr(self.connector, "connectors", [self.connector]):
            stats = getattr(part, "stats", None)
            hits["host"] += getattr(stats, "num_host_hits", 0)
            hits["disk"] += getattr(stats, "num_disk_hits", 0)
        return hits

    def drop(self, request_id: str) -> None:
        is_there = request_id in self._loads
        with self.watch.acting_for(request_id):
            super().drop(request_id)
        if is_there:
            self._begun.discard(request_id)
            self.watch.log.note(LoadEnded(request_id))


# -- schedulers


class SeenBooks(_Part):
    """What all schedulers have: their books."""

    watch: Watch

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._num_planned = 0
        self._under_way_steps: list[int] = []
        self._is_updating = False
        self._expected: dict[str, None] = {}  # the queue as a film would have it
        self._follows_arrival = True

    # -- requests

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        log, request_id = self.watch.log, request.request_id
        event = Arrived(
            log.now(),
            request_id,
            list(request.prompt_token_ids),
            self.watch.texts.begin(request),
            request.max_tokens,
            request.priority,
            label_of(normalise_extra_keys(extra_keys_of(request))),
            self._order_key(request),
        )
        self._expected[request_id] = None
        log.note(event)
        if len(self._expected) <= MAX_LOOKED_AT:
            self._note_queue()

    def _order_key(self, request: Request) -> str:
        return ""

    def forget(self, request: Request) -> None:
        request_id, texts = request.request_id, self.watch.texts
        reason, log = request.finish_reason or "", self.watch.log
        has_last_token = self._is_updating and reason != "error"
        rest = "" if has_last_token else texts.end(request)
        detail = request.length_limit if reason == "length" else None
        log.note(Finished(log.now(), request_id, reason, request.stop_reason, detail, rest))
        self._expected.pop(request_id, None)
        super().forget(request)

    def finish_requests(self, request_ids: str | Iterable[str], status: RequestStatus) -> None:
        super().finish_requests(request_ids, status)
        if status is not RequestStatus.FINISHED_STOPPED or not isinstance(request_ids, str):
            return
        if (cut := self.watch.texts.cut_of(request_ids)) is not None:
            self.watch.log.note(cut)

    def _has_been_admitted(self, request: Request) -> None:
        self._expected.pop(request.request_id, None)
        self.watch.log.note(Admitted(request.request_id, request.num_computed_tokens))

    def _note_queue(self) -> None:
        """The order of the queue, where it is not that of arrival with the preempted in front."""
        if not self._follows_arrival:
            order = self.queue_order()
            if order != list(self._expected):
                self._expected = dict.fromkeys(order)
                self.watch.log.note(Queue(order))

    def queue_order(self) -> list[str]:
        """Who waits, in the order of service. Asking changes nothing."""
        return [request.request_id for request in self.waiting]

    # -- steps

    def schedule(self) -> SchedulerOutput:
        watch = self.watch
        watch.passed_over, watch.parents, watch.refused = {}, {}, None
        start = time.monotonic()
        plan = super().schedule()
        schedule_ms = (time.monotonic() - start) * 1e3
        self._note_queue()
        watch.log.note(
            Planned(
                self._num_planned,
                watch.log.since_start(start),
                round(schedule_ms, 4),
                list(plan.num_scheduled_tokens),
                plan.start_positions,
                list(plan.num_scheduled_tokens.values()),
                plan.scheduled_draft_token_ids,
                *self._reasons(plan),
            )
        )
        self._under_way_steps.append(self._num_planned)
        self._num_planned += 1
        return plan

    def _reasons(
        self, plan: SchedulerOutput
    ) -> tuple[dict[str, str], dict[str, str], list[str] | None]:
        """`passed_over`, `parents` and `stop` of those who wait now."""
        watch, waiting = self.watch, self._expected
        stop = self._stop_of(plan) if waiting else None
        if stop is not None:
            stop = (_STOPS.get(stop[0], stop[0]), stop[1] if stop[1] in waiting else "")
        passed_over = {
            name: reason
            for name, reason in watch.passed_over.items()
            if name in waiting and (stop is None or name != stop[1])
        }
        parents = {name: whom for name, whom in watch.parents.items() if name in passed_over}
        return passed_over, parents, None if stop is None else list(stop)

    def _stop_of(self, plan: Any) -> tuple[str, str] | None:
        """What ended admission, and at whom."""
        if plan.admission_stop is None and plan.preempted_requests:
            return ("blocks", "")  # nobody is admitted for the memory that was just missing
        return plan.admission_stop

    def update_from_output(
        self, plan: SchedulerOutput, output: StepOutput
    ) -> Sequence[EngineCoreOutput]:
        log = self.watch.log
        alive = [request for request in plan.scheduled_requests if not request.is_finished]
        position, start = log.position, time.monotonic()
        self._is_updating = True
        try:
            results = super().update_from_output(plan, output)
        finally:
            self._is_updating = False
        end = time.monotonic()
        self._note_queue()
        tokens = self._taken_tokens(alive, results, output)
        texts, drafts = self.watch.texts, plan.scheduled_draft_token_ids
        pieces = {r.request_id: texts.add(r, tokens[r.request_id]) for r in alive}
        verified = {
            r.request_id: _verdict(len(drafts[r.request_id]), output.token_ids.get(r.request_id))
            for r in alive
            if r.request_id in drafts
        }
        gone = {r.request_id for r in plan.scheduled_requests} - tokens.keys()
        step = self._under_way_steps.pop(0)
        log.note_at(
            position,
            Computed(
                step,
                log.since_start(start),
                {name: round(ms, 4) for name, ms in output.times.items()},
                {name: ids for name, ids in tokens.items() if ids},
                {name: parts for name, parts in pieces.items() if parts},
                verified,
                {name: output.token_ids[name] for name in gone if output.token_ids.get(name)},
            ),
        )
        log.note(Updated(step, log.since_start(end), round((end - start) * 1e3, 4)))
        return results

    def _taken_tokens(
        self, alive: list[Request], results: Sequence[EngineCoreOutput], output: StepOutput
    ) -> dict[str, list[int]]:
        """By request, those that became outputs. Where results are made when somebody looks, only
        the others are looked at."""
        decided = getattr(results, "decided", None)
        if decided is None:
            decided = {result.request_id: result for result in results}
        tokens = {}
        for request in alive:
            result = decided.get(request.request_id)
            ids = output.token_ids.get(request.request_id, ())
            tokens[request.request_id] = list(ids if result is None else result.new_token_ids)
        return tokens

    def check_invariants(self) -> None:
        """Which asks the queue for its order: a policy may answer anew."""
        super().check_invariants()
        self._note_queue()


MAX_LOOKED_AT = 1_000  # waiting requests, for the order of the queue at each arrival


def _verdict(num_drafts: int, token_ids: Sequence[int] | None) -> list[int]:
    """Accepted, rejected."""
    num_accepted = max(0, len(token_ids or ()) - 1)
    return [num_accepted, num_drafts - num_accepted]


class SeenFCFSBooks(SeenBooks):
    """Chapters 1 to 3: first come, first served. These plans say nothing about who waits."""

    def _seat(self, request: Request) -> None:
        super()._seat(request)
        self._has_been_admitted(request)

    def _stop_of(self, plan: Any) -> tuple[str, str] | None:
        watch = self.watch
        if len(self.running) >= self.max_num_seqs:
            return ("seat", "")
        for name in self._expected:
            if name not in watch.passed_over:
                return ("blocks" if watch.refused == name else "budget", name)
        return None


class SeenBaseBooks(SeenBooks):
    """Chapter 4's: they preempt, and have policies."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        policy = self.waiting.policy
        self._follows_arrival = policy.name == "fcfs"
        self.waiting.policy = SeenPolicy(policy)
        self.chunk_policy = SeenChunks(self.chunk_policy, self.watch)

    def _order_key(self, request: Request) -> str:
        policy = self.waiting.policy
        return "" if self._follows_arrival or policy.looks_at_cache else str(policy.key(request))

    def queue_order(self) -> list[str]:
        """Where the policy looks at the cache, as it answered last."""
        policy = self.waiting.policy
        policy.answers_from_memory = True
        try:
            return [request.request_id for request in self.waiting._in_order()]
        finally:
            policy.answers_from_memory = False

    def seat(self, request: Request, *arguments: Any) -> bool:
        is_seated = super().seat(request, *arguments)
        if is_seated:
            self._has_been_admitted(request)
        return is_seated

    def preempt(self, request: Request) -> None:
        self.watch.log.note(Preempted(request.request_id, request.num_computed_tokens))
        self._expected = {request.request_id: None, **self._expected}
        super().preempt(request)

    def may_start(self, request: Request) -> bool:
        allowed = super().may_start(request)
        if not allowed:
            reason = "pending" if request.num_pending_tokens else "constraint"
            self.watch.passed_over[request.request_id] = reason
        return allowed


class SeenPolicy:
    """A policy, and what it last answered."""

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        self._order: list[Request] = []
        self.answers_from_memory = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def order(self, requests: Sequence[Request]) -> list[Request]:
        if not self.answers_from_memory:
            self._order = list(self._policy.order(requests))
            return list(self._order)
        present = dict.fromkeys(requests)
        known = [request for request in self._order if request in present]
        return list(dict.fromkeys([*known, *present]))


class SeenChunks:
    """A chunk policy that says whom it held back."""

    def __init__(self, policy: Any, watch: Watch) -> None:
        self._policy, self._watch = policy, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def may_start(self, request: Request, num_behind: int) -> bool:
        allowed = self._policy.may_start(request, num_behind)
        if not allowed:
            self._watch.passed_over[request.request_id] = "constraint"
        return allowed


# -- the loop


class SeenLoop(_Part):
    watch: Watch

    def step(self) -> Sequence[EngineCoreOutput]:
        with self._written():
            return super().step()

    def close(self) -> None:
        with self._written():
            super().close()

    @contextmanager
    def _written(self) -> Iterator[None]:
        log = self.watch.log
        log.in_step = True
        try:
            yield
        except BaseException as error:
            self.scheduler.scheduler._under_way_steps.clear()
            log.note(Failed(log.now(), f"{type(error).__name__}: {error}"[:500]))
            raise
        finally:
            log.in_step = False
            log.flush()
