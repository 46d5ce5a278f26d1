"""Watching: what puts an engine on film, and takes it off again, between any two steps.

A film that begins with the engine knows all from its events. One that begins later has a snapshot
in front of them. Nothing of an engine's parts knows of events; each is heard through the seam that
it has, or stands inside something that looks on:

    scheduler    the first plugin of its list; around it, in the recorder, for plans and times
    memory       a pool and a cache around its own (`watched_memory.py`)

So a scheduler, a policy or a cache of somebody else's is watched like those of the book."""

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
    """An engine of `parts` on film. `members` are those of its open requests, whose texts are
    events, too. Raises what `EventLog` does, or a part of somebody's that is asked, and has changed
    nothing then."""

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
        num_blocks, overlaps = parts.side.kv_cache.num_blocks, parts.in_flight_plans is not None
        windows = self.memory.windows
        self.run = describe_run(config, parts.side.model, num_blocks, overlaps, windows)
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
        """Nothing comes of the steps under way. None: nobody here has seen what was raised."""
        self.log.close_step()
        self.scheduler.steps_failed()
        said = "interrupted" if error is None else f"{type(error).__name__}: {error}"
        self.memory.note(Failed(self.log.now(), said[:500]))
        self.log.in_step = False
        self.log.flush()

    def beginning(self) -> str:
        """Between two steps: the lines with which a film would begin that goes on from here as this
        one does, for who comes later. What is not noted yet is, so that it comes before."""
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
        """The engine is as if nobody had ever watched, and the file is closed."""
        self.is_in = False
        self.recorder.scheduler = cast(SchedulerInterface, self.base_scheduler)
        self.requests.take_out(self.base_scheduler)
        self.memory.take_out()
        self.memory.settle()
        self.log.close()
