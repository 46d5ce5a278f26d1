"""Record an engine's frames: the differences from one state to the next, as lines of a file.

    {"at":"plan","time":0.2,"changes":{"computed":{"b":[5]},"in_flight":{"3":[{...}]}}}

    at        "start": watching began in the middle of a run; "between": requests arrived or were
              aborted since the last step; "plan": a step was planned; "result": its results were
              processed, which ends the step; "failed": a step raised

The first line describes the run (`run_line.py`); changes start from `empty_frame`. Lines of a
step are written together when it has ended, so that nothing is encoded while a part is timed.

A step costs what changed: blocks as `memory_changes.py` reports them, requests as the plans and the
first plugin of the scheduler's list (`wait_reasons.py`) do.

See common/events/README.md"""

from __future__ import annotations

import json
import logging
import time
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from base_scheduler import BaseScheduler
from common.events.engine_frame import filled, label_of, read_frame, row_of
from common.events.frames import BY_REQUEST, Frame, diff, empty_frame
from common.events.memory_changes import MemoryChanges
from common.events.run_line import describe_run, open_file
from common.events.text_deltas import TextDeltas
from common.events.wait_reasons import WaitReasons
from common.requests.engine_plugin import EnginePlugin
from prefix_cache import extra_keys_of, normalise_extra_keys
from request import Request, RequestStatus
from scheduler_interface import EngineCoreOutput, SchedulerInterface, SchedulerOutput, StepOutput

if TYPE_CHECKING:
    from common.assembly.assembly import EngineParts
    from common.engine_config import EngineConfig
    from common.requests.output_processor import OutputProcessor
    from common.requests.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class FrameRecorder(EnginePlugin):
    """Records the engine that consists of `parts`. `members` are the sequences of its open
    requests, whose texts are recorded, too. A `SchedulerInterface` that wraps another. Raises what
    `open_file` or a user's part raises, and then leaves the engine unchanged. The first write that
    fails is logged, and nothing is written after it."""

    def __init__(
        self,
        events: str | Path | TextIO,
        config: EngineConfig,
        parts: EngineParts,
        members: Mapping[str, OutputProcessor],
        tokenizer: Tokenizer | None,
    ) -> None:
        if isinstance(events, str | Path):
            self._file = open_file(Path(events))
            self._close = weakref.finalize(self, self._file.close)
        else:
            self._file = events  # the stream's owner closes it
            self._close = events.flush
        self._has_failed = False
        self._start = time.monotonic()
        self._lines: list[dict[str, Any]] = []
        self.recorder = parts.recorder
        self._scheduler = parts.recorder.scheduler
        self.base_scheduler = cast(BaseScheduler, self._scheduler)
        self._new_texts = partial(TextDeltas, members, tokenizer)
        self._texts = self._new_texts()
        self._adapter_name = parts.adapters.name_of if parts.adapters else lambda digest: None
        self.reasons = WaitReasons(parts.kv_memory, self._finished, self._checked)
        self.memory = MemoryChanges(parts, self.reasons.matched)
        side = parts.runner
        overlaps = parts.in_flight_plans is not None
        self._num_blocks = side.kv_cache.num_blocks
        run = describe_run(config, side, self._num_blocks, overlaps, self.memory.windows)
        self.run_line = f"{_encode(run)}\n"
        self._in_flight = deque(range(len(self.recorder.in_flight_plans)))  # step numbers
        self._num_planned = len(self._in_flight)
        self._num_requests = self._num_ended = 0
        # As written last:
        self._waiting: list[str] = []
        self._running: list[str] = []
        self._computed: dict[str, int] = {}
        self._rows: dict[str, dict[str, Any]] = {}
        self._ended: list[str] = []  # in the last frame; the next one removes them
        # Since then:
        self._changed: dict[str, Request] = {}  # arrived, admitted, preempted, ended
        self._arrivals: dict[str, dict[str, Any]] = {}
        self._finishes: dict[str, dict[str, Any]] = {}
        self._in_step = self._is_updating = False
        self._result: dict[str, Any] | None = None  # of the step that has not been closed yet
        self.is_in = False
        try:
            self.put_in()
        except BaseException:
            self.take_out()
            raise

    def put_in(self) -> None:
        scheduler = self.base_scheduler
        self.memory.put_in(list(scheduler.requests))
        self.reasons.put_in(scheduler)
        self.recorder.scheduler = cast(SchedulerInterface, self)
        frame = self.frame(self._texts)
        self._waiting = frame["waiting"]
        self._running = frame["running"]
        self._computed = dict(frame["computed"])
        self._rows = dict(frame["requests"])
        self._num_requests = len(scheduler.requests)
        self._put(self.run_line)
        if changes := diff(empty_frame(self._num_blocks), frame):
            self._lines.append(self._line("start", changes))
        self.flush()
        self.is_in = True

    def take_out(self) -> None:
        """Stop recording: restore the engine's parts and close the file."""
        self.recorder.scheduler = cast(SchedulerInterface, self._scheduler)
        self.reasons.take_out(self.base_scheduler)
        self.memory.take_out()
        if self.is_in:
            self._close_step()
            self._write("between")
            self.flush()
        self.is_in = False
        try:
            self._close()
        except Exception:
            logger.exception("cannot close the file of the recorded run")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    # -- frames

    def frame(self, texts: TextDeltas | None = None) -> Frame:
        """Return the whole frame between two steps, with texts for a viewer that begins here."""
        scheduler = self.base_scheduler
        memory = self.memory
        plans = dict(zip(self._in_flight, self.recorder.in_flight_plans))
        frame = read_frame(
            scheduler, memory.memory, memory.cache, memory.loads, self.reasons.queue_order(), plans
        )
        frame |= {"pieces": {}, "loaded": memory._loaded(), "result": None}
        for number, request in enumerate(scheduler.requests.values()):
            name = request.request_id
            pieces = [] if texts is None else texts.begin(request)
            frame["requests"][name] |= self._arrival(request, number, pieces)
            outputs = frame["outputs"][name]
            frame["pieces"][name] = [] if texts is None else texts.add(request, outputs)
        return frame

    def _arrival(self, request: Request, number: int, pieces: list[str]) -> dict[str, Any]:
        """The part of a request's row that never changes."""
        digest, source = map(request.features.get, ("adapter", "grammar"))
        adapter = digest and (self._adapter_name(digest) or digest[:8])
        return {
            "number": number,
            "prompt": list(request.prompt_token_ids),
            "prompt_pieces": pieces,
            "max_tokens": request.max_tokens,
            "priority": request.priority,
            "tenant": label_of(normalise_extra_keys(extra_keys_of(request))),
            "order_key": self.reasons.order_key(request),
            "adapter": adapter or "",
            "grammar": source.split('"')[1] if source else "",
            "arrived_at": self._since_start(request.arrival_time),
        }

    def _write(
        self,
        at: str,
        requests: Iterable[Request] = (),
        tokens: Mapping[str, list[int]] | None = None,
        pieces: Mapping[str, list[str]] | None = None,
        waiting: list[str] | None = None,
        **facts: Any,
    ) -> None:
        """Note a frame: what changed in `requests`, their new `tokens` with texts, everything that
        was reported, and `facts`. A frame between steps without changes is left out."""
        changes = self.memory.take() | self._lists(waiting)
        if at == "between" and not (changes or self._changed):
            return
        changes |= self._columns(requests, tokens or {}, pieces or {}) | facts
        self._lines.append(self._line(at, changes))

    def _line(self, at: str, changes: dict[str, Any]) -> dict[str, Any]:
        return {"at": at, "time": self._since_start(time.monotonic()), "changes": changes}

    def _since_start(self, seconds: float) -> float:
        return round(seconds - self._start, 6)

    def _lists(self, waiting: list[str] | None) -> dict[str, Any]:
        running = list(self.base_scheduler.running)
        changes = {}
        waiting = self.reasons.queue_order() if waiting is None else waiting
        for name, now in (("waiting", waiting), ("running", running)):
            before = getattr(self, f"_{name}")
            if now != before:
                changes[name] = diff(before, now)
                setattr(self, f"_{name}", now)
        return changes

    def _columns(
        self,
        requests: Iterable[Request],
        tokens: Mapping[str, list[int]],
        pieces: Mapping[str, list[str]],
    ) -> dict[str, Any]:
        """Return the changes of everything that is kept by request."""
        columns = rows, computed, outputs, texts = {}, {}, {}, {}
        for name in self._ended:
            for column in columns:
                column[name] = None
        for name in self._arrivals:
            computed[name] = [0]
            outputs[name] = [[]]
            texts[name] = [[]]
            self._computed[name] = 0
        for request in (*self._changed.values(), *requests):
            name = request.request_id
            num = request.num_computed_tokens
            if self._computed.get(name) != num:
                self._computed[name] = num
                computed[name] = [num]
        outputs |= {name: [[], ids] for name, ids in tokens.items() if ids}
        texts |= {name: [[], parts] for name, parts in pieces.items() if parts}
        self._ended = list(self._finishes)
        for name, request in self._changed.items():
            before = self._rows.get(name)
            now = (self._arrivals[name] if before is None else before) | row_of(request)
            if name in self._finishes:
                now["finish"] = self._finishes[name]
            if before is None:
                rows[name] = [now]
            elif changes := diff(before, now):
                rows[name] = changes
            self._rows[name] = now
        for name in self._ended:
            del self._rows[name], self._computed[name]
        self._changed = {}
        self._arrivals = {}
        self._finishes = {}
        return {name: column for name, column in zip(BY_REQUEST, columns) if column}

    def flush(self) -> None:
        """Write all noted frames, after the step whose results were processed last."""
        self._close_step()
        self._in_step = False
        lines = self._lines
        self._lines = []
        if lines:
            self._put("".join([f"{_encode(line)}\n" for line in lines]))

    def _put(self, text: str) -> None:
        if self._has_failed:
            return
        try:
            self._file.write(text)
            self._file.flush()
        except Exception:  # a full disk, a closed pipe: no request ends because of that
            self._has_failed = True
            logger.exception("the run is not recorded any more")

    # -- requests

    def add_request(self, request: Request) -> None:
        self._scheduler.add_request(request)
        name = request.request_id
        if name in self._changed:
            self._write("between")  # two requests of one name cannot be in one frame
        number = self._num_requests
        self._num_requests += 1
        self._arrivals[name] = self._arrival(request, number, self._texts.begin(request))
        self._changed[name] = request

    def finish_requests(self, request_ids: str | Iterable[str], status: RequestStatus) -> None:
        self._scheduler.finish_requests(request_ids, status)
        if isinstance(request_ids, str) and (cut := self._texts.cut_of(request_ids)):
            # The last token may already have ended the request.
            end = self._finishes.setdefault(request_ids, {"time": 0.0, "rest": ""})
            end |= {"reason": "stop", "detail": None}
            end["stop_reason"], end["text_length"] = cut

    def _finished(self, request: Request) -> None:
        name = request.request_id
        reason = request.finish_reason or ""
        has_last_token = self._is_updating and reason != "error"
        self._changed[name] = request
        self._finishes[name] = {
            "time": self._since_start(time.monotonic()),
            "reason": reason,
            "stop_reason": request.stop_reason,
            "detail": request.length_limit if reason == "length" else None,
            "rest": "" if has_last_token else self._texts.end(request),
            "text_length": None,
        }

    def between_steps(self) -> None:
        """Write an abort or a reset of the cache. New requests are written with the next step."""
        if self._finishes or self.memory.has_changed:
            self._checked()

    def _checked(self) -> None:
        if not self._in_step:
            self._write("between")
            self.flush()

    # -- steps

    def schedule(self) -> SchedulerOutput:
        self._close_step()
        if self._changed:
            self._write("between")
        self._in_step = True
        step = self._num_planned
        start = time.monotonic()
        plan = self._scheduler.schedule()
        schedule_ms = round((time.monotonic() - start) * 1e3, 4)
        reasons = self.reasons
        requests = self.base_scheduler.requests
        moved = [name for name, *_ in (*reasons.admitted, *reasons.preempted)]
        self._changed |= {name: requests[name] for name in moved if name in requests}
        row = filled(
            requests=list(plan.num_scheduled_tokens),
            starts=plan.start_positions,
            num_tokens=list(plan.num_scheduled_tokens.values()),
            drafts=plan.scheduled_draft_token_ids,
            **reasons.decisions(plan, waiting := reasons.queue_order()),
            time=self._since_start(start),
            schedule_ms=schedule_ms,
        )
        self._write("plan", plan.scheduled_requests, waiting=waiting, in_flight={str(step): [row]})
        self._in_flight.append(step)
        self._num_planned += 1
        return plan

    def update_from_output(
        self, plan: SchedulerOutput, output: StepOutput
    ) -> Sequence[EngineCoreOutput]:
        alive = [request for request in plan.scheduled_requests if not request.is_finished]
        self._close_step()
        if self._changed:
            self._write("between")
        self._in_step = self._is_updating = True  # with overlap, the last steps plan nothing
        start = time.monotonic()
        try:
            results = self._scheduler.update_from_output(plan, output)
        finally:
            self._is_updating = False
        end = time.monotonic()
        tokens = {request.request_id: list[int]() for request in alive}
        tokens |= {result.request_id: list(result.new_token_ids) for result in results}
        drafts = plan.scheduled_draft_token_ids
        sampled = output.token_ids
        verified = [r.request_id for r in alive if r.request_id in drafts]
        gone = [r.request_id for r in plan.scheduled_requests if r.request_id not in tokens]
        self._result = {
            "requests": alive,
            "tokens": tokens,
            "pieces": {r.request_id: self._texts.add(r, tokens[r.request_id]) for r in alive},
            "result": self._numbered(step=self._in_flight.popleft())
            | filled(
                time=self._since_start(start),
                times={name: round(ms, 4) for name, ms in output.times.items()},
                update_ms=round((end - start) * 1e3, 4),
                verified={n: _verdict(len(drafts[n]), sampled.get(n)) for n in verified},
                discarded={n: sampled[n] for n in gone if sampled.get(n)},
            ),
        }
        return results

    def _numbered(self, **facts: Any) -> dict[str, Any]:
        """Number the steps that end, so that no result equals the one before."""
        number = self._num_ended
        self._num_ended += 1
        return {"number": number, **facts}

    def _close_step(self) -> None:
        """Note the frame of the results that were processed last. A stop string is found later
        than its token, and still ends its request in this step."""
        if self._result is None:
            return
        step = self._result
        self._result = None
        result = step["result"]
        self._write(
            "result",
            step["requests"],
            step["tokens"],
            step["pieces"],
            in_flight={str(result["step"]): None},
            result=[result],
        )

    def on_error(self, error: BaseException | None) -> None:
        """Record a failed step; steps in flight have no results. `error` is None if the exception
        is unknown."""
        self._close_step()
        said = "interrupted" if error is None else f"{type(error).__name__}: {error}"
        steps = self._in_flight
        self._in_flight = deque()
        in_flight = {str(step): None for step in steps}
        result = self._numbered(error=said[:500])
        self._write("failed", in_flight=in_flight, result=[result])
        self.flush()

    def beginning(self) -> str:
        """Return the first lines of a film that starts now and continues with this one's lines, for
        a later viewer. Call it between two steps. Pending frames are written first."""
        self._close_step()
        self._write("between")
        self.flush()
        changes = diff(empty_frame(self._num_blocks), self.frame(self._new_texts()))
        return f"{self.run_line}{_encode(self._line('start', changes))}\n"


def _verdict(num_drafts: int, token_ids: Sequence[int] | None) -> list[int]:
    """Return the numbers of accepted and rejected draft tokens."""
    num_accepted = max(0, len(token_ids or ()) - 1)
    return [num_accepted, num_drafts - num_accepted]
