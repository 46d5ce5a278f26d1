"""`Watch`: start and stop recording an engine's events, between any two steps.

The events of a recording (a film) that begins with the engine are complete. A later film starts
with a snapshot. The engine's parts do not know of events; each is observed through its extension
point, or wrapped by an object that records:

    scheduler    the first plugin of its list; wrapped, in the recorder, for plans and times
    memory       its pool and its cache are wrapped (`watched_memory.py`)

So a user's scheduler, policy or cache is recorded like those of the book."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, cast

from base_scheduler import BaseScheduler
from common.events.event_kinds import Failed, to_line
from common.events.event_log import EventLog, TextDeltas, describe_run
from common.events.snapshot import is_as_new, take_snapshot
from common.events.watched_memory import MemoryWatch
from common.events.watched_scheduler import RequestWatch, StepWatch
from scheduler_interface import SchedulerInterface

if TYPE_CHECKING:
    from common.assembly.scheduler_assembly import EngineParts
    from common.engine_config import EngineConfig
    from common.requests.output_processor import OutputProcessor
    from common.requests.tokenizer import Tokenizer


class Watch:
    """Records the engine that consists of `parts`. `members` are the sequences of its open
    requests, whose texts are recorded, too. Raises what `EventLog` or a user's part raises, and
    then leaves the engine unchanged."""

    def __init__(
        self,
        events: str | Path | TextIO,
        config: EngineConfig,
        parts: EngineParts,
        members: Mapping[str, OutputProcessor],
        tokenizer: Tokenizer | None,
    ) -> None:
        self.log, self.recorder = EventLog(events), parts.recorder
        self.is_in = False
        inner = parts.recorder.scheduler
        self.base_scheduler = cast(BaseScheduler, inner)
        self._new_texts = partial(TextDeltas, members, tokenizer)
        texts = self._new_texts()
        self.memory = MemoryWatch(self.log, parts.kv_memory, parts.connector)
        name_of = parts.adapters.name_of if parts.adapters else lambda digest: None
        self.requests = RequestWatch(self.log, texts, self.memory, name_of)
        num_blocks, overlaps = (
            parts.runner_handle.kv_cache.num_blocks,
            parts.in_flight_plans is not None,
        )
        windows = self.memory.windows
        self.run = describe_run(config, parts.runner_handle.model, num_blocks, overlaps, windows)
        self.log.note(self.run)
        under_way = self.recorder.in_flight_plans
        self.scheduler = StepWatch(inner, self.requests, len(under_way))
        try:
            self.memory.put_in(list(self.base_scheduler.requests))
            self.requests.put_in(self.base_scheduler)
            self.recorder.scheduler = cast(SchedulerInterface, self.scheduler)
            snapshot = take_snapshot(
                self.log,
                texts,
                self.base_scheduler,
                self.requests,
                under_way,
                self.scheduler.under_way,
            )
            if not is_as_new(snapshot, num_blocks):
                self.log.note(snapshot)
            self.is_in = True
        except BaseException:
            self.take_out()
            raise

    def failed(self, error: BaseException | None) -> None:
        """Record a failed step; steps in flight have no results. `error` is None if the exception
        is unknown."""
        self.log.close_step()
        self.scheduler.steps_failed()
        said = "interrupted" if error is None else f"{type(error).__name__}: {error}"
        self.memory.note(Failed(self.log.now(), said[:500]))
        self.log.in_step = False
        self.log.flush()

    def beginning(self) -> str:
        """Return the first lines of a film that starts now and continues with this one's lines, for
        a later viewer. Call it between two steps. Pending events are written first."""
        self.requests.note_queue()
        self.memory.settle()
        self.log.flush()
        under_way, scheduler = self.recorder.in_flight_plans, self.scheduler
        snapshot = take_snapshot(
            self.log,
            self._new_texts(),
            self.base_scheduler,
            self.requests,
            under_way,
            scheduler.under_way,
        )
        return f"{to_line(self.run)}\n{to_line(snapshot)}\n"

    def take_out(self) -> None:
        """Stop recording: restore the engine's parts and close the file."""
        self.is_in = False
        self.recorder.scheduler = cast(SchedulerInterface, self.base_scheduler)
        self.requests.take_out(self.base_scheduler)
        self.memory.take_out()
        self.memory.settle()
        self.log.close()
