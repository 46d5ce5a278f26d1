"""`EngineLoop`: the thread that owns the engine. Runs steps while there are unfinished requests,
and the commands in its inbox between two steps.

    inbox: add, abort, call  ->  engine.step()  ->  deliver(deltas, stats, is_last), once a step

Any thread can put commands into the inbox, and never waits.

See common/serve/README.md#the-way-of-one-request"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any

from common.engine import LLMEngine
from common.engine_config import EngineStats
from common.sampling.runner_plugin import NO_TOKEN
from common.serve.deltas import DeltaSource, RequestDelta
from request import SamplingParams

logger = logging.getLogger(__name__)
UNCOMPILED = "grammar: cannot compile"
MAX_FAILURES = 3  # after this many failed steps in a row the engine stops


class QueueFull(Exception):
    """A valid request is refused because too many are waiting."""


class PromptTooLong(ValueError):
    """The prompt and an answer exceed the model's maximum length."""


class EngineError(RuntimeError):
    """An accepted request cannot continue; the message gives the reason. All requests of a step get
    the message, so it names only an exception's type; `__cause__` is the exception itself."""

    def __init__(self, message: str | None, cause: BaseException | None = None) -> None:
        super().__init__(message)
        self.__cause__ = cause


class EngineStopped(EngineError):
    """The engine has failed or is closed, or the server is shutting down."""


class EngineLoop:
    """Creates and owns an engine. `make_engine` is called in the engine's thread, because torch's
    number of threads is a setting of the calling thread; `deliver` is called there, too: after
    `is_last` nothing follows, so everything still pending has failed. At most
    `max_waiting` sequences (a request has `n`) may exist in addition to `max_num_seqs`; more are
    refused."""

    def __init__(
        self,
        make_engine: Callable[[], LLMEngine],
        deliver: Callable[[list[RequestDelta], EngineStats, bool], None],
        max_waiting: int | None = None,
    ) -> None:
        self._make_engine = make_engine
        self._deliver = deliver
        self._max_waiting = max_waiting
        self._inbox = SimpleQueue[Callable[[], None]]()
        self._sources: dict[str, DeltaSource] = {}
        self._deltas: list[RequestDelta] = []  # to be delivered
        self._last_error: Exception | None = None  # set if the last step failed
        self._death_error: BaseException | None = None
        self._num_failures = 0
        self._is_closing = False
        self.death_reason: str | None = None
        self.made = Future[LLMEngine]()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # -- from any thread

    def add(
        self, request_id: str, token_ids: list[int], params: SamplingParams, options: dict[str, Any]
    ) -> None:
        self._inbox.put(partial(self._add, request_id, token_ids, params, options))

    def abort(self, request_id: str) -> None:
        self._inbox.put(partial(self._abort, request_id))

    def call(self, method: Callable[..., Any], *arguments: Any) -> Future:
        """Run `method(engine, *arguments)` between two steps. Returns its result to come."""
        future = Future()
        self._inbox.put(partial(self._call, future, method, *arguments))
        return future

    def close(self, timeout_s: float = 10.0) -> None:
        self._inbox.put(self._close)
        self._thread.join(timeout_s)

    # -- in the engine's thread

    def _run(self) -> None:
        try:
            engine = self._engine = self._make_engine()
        except BaseException as error:
            self.made.set_exception(error)
            return
        self.made.set_result(engine)
        try:
            while not self._is_closing:
                self._drain_inbox()
                if engine.has_unfinished_requests():
                    self._step()
                self._send_update()
            self.death_reason = "the engine is closed"
        except BaseException as error:
            logger.exception("the engine has stopped")
            self.death_reason = f"the engine has stopped: {type(error).__name__}"
            self._death_error = error
        stopped = EngineStopped(self.death_reason, self._death_error)
        self._deltas += [RequestDelta(name, finished=True, error=stopped) for name in self._sources]
        self._sources.clear()
        self._send_update()
        try:
            engine.close()
        except Exception:
            logger.exception("the engine could not be closed")
        while not self._is_closing:  # later requests get the reason as their error
            self._drain_inbox()
            self._send_update()
        self._send_update(is_last=True)

    def _drain_inbox(self) -> None:
        """Run all commands in the inbox. Blocks for the first one if there is no step to run."""
        must_wait = self.death_reason is not None or not self._engine.has_unfinished_requests()
        while must_wait or not self._inbox.empty():
            command = self._inbox.get()
            command()
            must_wait = False

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except Exception as error:
            logger.exception("a step has failed")
            self._last_error = error
            self._num_failures += 1
            if getattr(error, "is_final", False) or self._num_failures >= MAX_FAILURES:
                raise
            return  # the next step returns the requests that were aborted
        for output in outputs:
            if (source := self._sources.get(output.request_id)) is not None:
                delta = self._take(source)
                self._deltas.append(delta)
                if delta.error is None:
                    self._num_failures = 0
        self._last_error = None

    def _take(self, source: DeltaSource) -> RequestDelta:
        delta = source.take()
        if delta.finished:
            del self._sources[delta.request_id]
            reasons = {sequence.completion.finish_reason for sequence in source.group.sequences}
            if "abort" in reasons:  # not requested through this loop
                delta.error = EngineError("the request was ended")
            elif "error" in reasons:
                detail = str(source.group.metrics.finish_detail)
                is_clients = detail.startswith(UNCOMPILED) or detail.endswith(NO_TOKEN)
                failure = EngineError(detail, self._last_error)
                delta.error = ValueError(detail) if is_clients else failure
        return delta

    def _send_update(self, is_last: bool = False) -> None:
        deltas = self._deltas
        self._deltas = []
        self._deliver(deltas, self._engine.stats(), is_last)

    def _add(
        self, request_id: str, token_ids: list[int], params: SamplingParams, options: dict[str, Any]
    ) -> None:
        engine = self._engine
        try:
            if self.death_reason is not None:
                raise EngineStopped(self.death_reason, self._death_error)
            num = sum(engine.core.get_request_counts())
            max_waiting = self._max_waiting
            num_places = engine.config.max_num_seqs + (max_waiting or 0)
            if max_waiting is not None and num + params.n > num_places:
                raise QueueFull(
                    f"the queue is full: {num} sequences run or wait, {max_waiting} may wait"
                )
            group = engine.add_request(request_id, token_ids, params, **options)
        except Exception as error:
            self._deltas.append(RequestDelta(request_id, finished=True, error=error))
            return
        source = self._sources[request_id] = DeltaSource(group)
        self._deltas.append(source.accepted())

    def _abort(self, request_id: str) -> None:
        if request_id in self._sources:
            del self._sources[request_id]
            self._engine.abort_request(request_id)

    def _call(self, future: Future, method: Callable[..., Any], *arguments: Any) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(method(self._engine, *arguments))
        except Exception as error:
            future.set_exception(error)

    def _close(self) -> None:
        self._is_closing = True
