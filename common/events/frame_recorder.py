"""Record an engine's frames: the differences from one state to the next, as lines of a file.

    {"at":"plan","time":0.2,"changes":{"computed":{"b":[5]},"in_flight":{"3":[{...}]}}}

    at        "start": watching began in the middle of a run; "between": requests arrived or were
              aborted since the last step; "plan": a step was planned; "result": its results were
              processed, which ends the step; "failed": a step raised

The first line describes the run (`run_line.py`); changes start from `empty_frame`. At each moment
the recorder reads the whole engine (`engine_frame.py`) and notes the difference to the frame
before. Lines of a step are written together when it has ended.

See common/events/README.md"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from common.events.engine_frame import CachedRows, filled, label_of, read_frame
from common.events.frames import Frame, diff, empty_frame
from common.events.run_line import describe_run, open_file
from common.events.text_deltas import TextDeltas
from common.events.wait_reasons import WaitReasons
from prefix_cache import extra_keys_of, normalise_extra_keys
from request import Request
from scheduler_interface import SchedulerOutput, StepOutput

if TYPE_CHECKING:
    from common.assembly.assembly import EngineParts
    from common.engine_config import EngineConfig
    from common.requests.output_processor import OutputProcessor
    from common.requests.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


@dataclass
class _KnownRequest:
    """A request that is in the last frame."""

    request: Request
    texts: TextDeltas | None  # None: without a tokenizer
    row: dict[str, Any]  # what never changes


class FrameRecorder:
    """Records the engine that consists of `parts`. `members` are the sequences of its open
    requests, whose texts are recorded, too. Raises what `open_file` raises. The first write that
    fails is logged, and nothing is written after it."""

    def __init__(
        self,
        events: str | Path | TextIO,
        config: EngineConfig,
        parts: EngineParts,
        members: Mapping[str, OutputProcessor],
        tokenizer: Tokenizer | None,
    ) -> None:
        self._owns_file = isinstance(events, str | Path)
        self._file = open_file(Path(events)) if isinstance(events, str | Path) else events
        self._has_failed = False
        self._start = time.monotonic()
        self._lines: list[dict[str, Any]] = []
        self._scheduler = parts.scheduler
        self._memory = parts.kv_memory
        self._connector = parts.connector
        self._members = members
        self._tokenizer = tokenizer
        self._adapters = parts.adapters
        self._num_blocks = parts.runner.kv_cache.num_blocks
        self.run_line = f"{_encode(describe_run(config, parts))}\n"
        self.reasons = WaitReasons(parts.kv_memory, self)
        self._frame = empty_frame(self._num_blocks)  # as of the last line
        self._cached = CachedRows()
        self._known: dict[str, _KnownRequest] = {}
        self._ended: dict[str, tuple[Request, float]] = {}  # since the last frame, and when
        self._has_arrivals = False
        self._num_requests = 0
        core = parts.multi_step_core
        self._num_planned = 0 if core is None else len(core.in_flight)
        self._plans: dict[str, dict[str, Any]] = {str(i): {} for i in range(self._num_planned)}
        self._num_ended = 0
        self._in_step = False
        self._received: dict[str, Any] | None = None  # the result of a step that has not ended
        self._result: dict[str, Any] | None = None
        self.reasons.put_in(self._scheduler)
        try:
            self._put(self.run_line)
            self._write("start")
            self.flush()
        except BaseException:
            self.reasons.take_out(self._scheduler)
            raise

    def take_out(self) -> None:
        """Stop recording: restore the engine's parts and close the file."""
        self.reasons.take_out(self._scheduler)
        self._close_step()
        self._catch_up()
        self.flush()
        try:
            self._file.close() if self._owns_file else self._file.flush()
        except OSError:
            logger.exception("cannot close the recorded run")

    # -- frames

    @property
    def is_behind(self) -> bool:
        """Whether requests have arrived or ended since the last frame."""
        return self._has_arrivals or bool(self._ended)

    def _catch_up(self) -> None:
        if self.is_behind:
            self._write("between")

    def _write(self, at: str) -> None:
        """Note a frame. One without changes is left out."""
        now = self.frame()
        if now["cached"] is not self._frame["cached"]:
            self._say_who_published(now, at)
        changes = diff(self._frame, now)
        for block, change in changes.get("cached", {}).items():
            changes["cached"][block] = change and [now["cached"][block]]
        if "result" in changes:
            changes["result"] = [now["result"]]
        if changes:
            self._lines.append(self._line(at, changes))
        self._frame = now

    def _say_who_published(self, now: Frame, at: str) -> None:
        """Add `by` to the rows of blocks that are cached now: the request that had the block, which
        was not shared then; "" if watching began later."""
        holders: dict[int, str] = {}
        for frame in (now, self._frame) if at != "start" else ():
            for name, load in frame["loads"].items():
                holders |= dict.fromkeys(load["blocks"], name)
            for name, groups in frame["tables"].items():
                for block_ids in groups.values():
                    holders |= dict.fromkeys(block_ids, name)
        for block, row in now["cached"].items():
            if "by" not in row:
                row["by"] = holders.get(int(block), "")

    def _line(self, at: str, changes: dict[str, Any]) -> dict[str, Any]:
        return {"at": at, "time": self._since_start(time.monotonic()), "changes": changes}

    def _since_start(self, seconds: float) -> float:
        return round(seconds - self._start, 6)

    def frame(self) -> Frame:
        """Read the engine. Requests that have ended since the last frame are still in it."""
        ended = self._ended
        self._ended = {}
        self._has_arrivals = False
        requests = [request for request, _ in ended.values()]
        requests += self._scheduler.requests.values()
        frame = read_frame(
            self._scheduler, self._memory, requests, self.reasons.queue_order(), self._cached
        )
        rows = frame["requests"] = {}
        texts = frame["pieces"] = {}
        known = self._known
        self._known = {}
        for request in requests:
            name = request.request_id
            found = known.get(name)
            if found is None or found.request is not request:
                found = self._arrived(request)
            row = found.row | {
                "num_cached": request.num_cached_tokens,
                "num_preemptions": request.num_preemptions,
            }
            texts[name] = [] if found.texts is None else found.texts.pieces()
            if name in ended:
                row["finish"] = self._finish(found, ended[name][1])
            else:
                self._known[name] = found
            rows[name] = row
        counts = {} if self._connector is None else self._connector.num_loaded_blocks()
        frame["loaded"] = {tier: num for tier, num in counts.items() if num}
        return frame | {"in_flight": dict(self._plans), "result": self._result}

    def _arrived(self, request: Request) -> _KnownRequest:
        texts = None
        if self._tokenizer is not None:
            output = self._members.get(request.request_id)
            texts = TextDeltas(request, output, self._tokenizer)
        number = self._num_requests
        self._num_requests += 1
        digest = request.features.get("adapter")
        grammar = request.features.get("grammar")
        names = {} if self._adapters is None else self._adapters.by_digest
        name = names[digest][0] if digest in names else None
        row = {
            "number": number,
            "prompt": list(request.prompt_token_ids),
            "prompt_pieces": [] if texts is None else texts.prompt_pieces,
            "max_tokens": request.max_tokens,
            "priority": request.priority,
            "tenant": label_of(normalise_extra_keys(extra_keys_of(request))),
            "order_key": self.reasons.order_key(request),
            "adapter": name or (digest or "")[:8],
            "grammar": grammar.split('"')[1] if grammar else "",
            "arrived_at": self._since_start(request.arrival_time),
        }
        return _KnownRequest(request, texts, row)

    def _finish(self, known: _KnownRequest, ended_at: float) -> dict[str, Any]:
        """How a request has ended. A stop string is found later than its token, which may already
        have ended the request."""
        request = known.request
        reason = request.finish_reason or ""
        finish = {
            "time": self._since_start(ended_at),
            "reason": reason,
            "stop_reason": request.stop_reason,
            "detail": request.length_limit if reason == "length" else None,
            "rest": "" if known.texts is None else known.texts.rest(),
            "text_length": None,
        }
        if known.texts is not None and (cut := known.texts.cut()) is not None:
            finish |= {"reason": "stop", "detail": None}
            finish["stop_reason"], finish["text_length"] = cut
        return finish

    def flush(self) -> None:
        """Write all noted frames, after the step whose results were processed last."""
        self._close_step()
        self._in_step = False
        text = "".join([f"{_encode(line)}\n" for line in self._lines])
        self._lines = []
        if text:
            self._put(text)

    def _put(self, text: str) -> None:
        if self._has_failed:
            return
        try:
            self._file.write(text)
            self._file.flush()
        except Exception:  # a full disk, a closed pipe: no request ends because of that
            self._has_failed = True
            logger.exception("the run is not recorded any more")

    def beginning(self) -> str:
        """Return the first lines of a film that starts now and continues with this one's lines, for
        a later viewer. Call it between two steps. Pending frames are written first."""
        self._close_step()
        self._catch_up()
        self.flush()
        changes = diff(empty_frame(self._num_blocks), self._frame)
        return f"{self.run_line}{_encode(self._line('start', changes))}\n"

    # -- requests

    def on_add(self, request: Request) -> None:
        self._has_arrivals = True

    def ended(self, request: Request) -> None:
        self._ended[request.request_id] = request, time.monotonic()

    def between_steps(self) -> None:
        """Close a step whose results were processed, or write an abort. New requests are written
        with the next step."""
        if self._in_step:
            self._close_step()
        elif self._ended:
            self._write("between")
            self.flush()

    # -- steps

    def begin_step(self) -> None:
        self._close_step()
        self._catch_up()
        self._in_step = True
        self._planning_since = time.monotonic()

    def planned(self, plan: SchedulerOutput) -> None:
        start = self._planning_since
        self._plans[str(self._num_planned)] = filled(
            requests=list(plan.num_scheduled_tokens),
            starts=plan.start_positions,
            num_tokens=list(plan.num_scheduled_tokens.values()),
            drafts=plan.scheduled_draft_token_ids,
            **self.reasons.decisions(plan),
            time=self._since_start(start),
            schedule_ms=_ms_since(start),
        )
        self._num_planned += 1
        self._write("plan")

    def received(self, plan: SchedulerOutput, output: StepOutput) -> None:
        """The results of the oldest plan are there, and are processed next."""
        self._close_step()
        self._catch_up()
        self._in_step = True  # with overlap, the last steps plan nothing
        self._received_at = time.monotonic()
        sampled = output.token_ids
        gone = [r.request_id for r in plan.scheduled_requests if r.is_finished]
        verified = {}
        for name, drafts in plan.scheduled_draft_token_ids.items():
            if name not in gone:
                num_accepted = max(0, len(sampled.get(name, ())) - 1)
                verified[name] = [num_accepted, len(drafts) - num_accepted]
        self._received = filled(
            time=self._since_start(self._received_at),
            times={name: round(ms, 4) for name, ms in output.times.items()},
            verified=verified,
            discarded={name: sampled[name] for name in gone if sampled.get(name)},
        )

    def _close_step(self) -> None:
        """Note the frame of the results that were processed last."""
        if self._received is None:
            return
        step = next(iter(self._plans))
        del self._plans[step]
        update_ms = _ms_since(self._received_at)
        self._end_step({"step": int(step), **self._received, "update_ms": update_ms})
        self._write("result")

    def _end_step(self, facts: dict[str, Any]) -> None:
        """Number the steps that end, so that no result equals the one before."""
        self._received = None
        self._result = {"number": self._num_ended, **facts}
        self._num_ended += 1

    def on_error(self, error: BaseException | None) -> None:
        """Record a failed step; steps in flight have no results. The engine's state may be
        inconsistent, and is read later. `error` is None if the exception is unknown."""
        said = "interrupted" if error is None else f"{type(error).__name__}: {error}"
        self._plans.clear()
        self._end_step({"error": said[:500]})
        failed = self._frame | {"in_flight": {}, "result": self._result}
        changes = diff(self._frame, failed) | {"result": [self._result]}
        self._lines.append(self._line("failed", changes))
        self._frame = failed
        self.flush()


def _ms_since(start: float) -> float:
    return round((time.monotonic() - start) * 1e3, 4)
