"""`EngineLoop`: the thread that owns the engine. Runs steps while there are unfinished requests,
and the commands in its inbox between two steps.

    inbox: add, abort, call  ->  engine.step()  ->  deliver(EngineUpdate), once a step

Any thread can put commands into the inbox, and never waits.

See common/serve/README.md#the-way-of-one-request"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from common.engine import LLMEngine
from common.sampling.runner_plugin import NO_TOKEN
from common.serve.deltas import DeltaSource, EngineUpdate, RequestDelta
from request import SamplingParams

logger = logging.getLogger(__name__)
UNCOMPILED = "grammar: cannot compile"
MAX_GATHER_GAP_S = 0.01  # between two requests that arrive together
MAX_ADD_S = 0.02  # time for adding new requests before running requests get another step
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
    number of threads is a setting of the calling thread; `deliver` is called there, too. At most
    `max_waiting` sequences (a request has `n`) may exist in addition to `max_num_seqs`; more are
    refused."""

    def __init__(
        self,
        make_engine: Callable[[], LLMEngine],
        deliver: Callable[[EngineUpdate], None],
        max_waiting: int | None = None,
    ) -> None:
        self._make_engine = make_engine
        self._deliver = deliver
        self._max_waiting = max_waiting
        self._inbox = SimpleQueue[tuple[Callable[..., None], tuple]]()
        self._new_requests: dict[str, tuple] = {}  # requests that are not added yet, in order
        self._sources: dict[str, DeltaSource] = {}
        self._num_sequences = 0  # of the requests in `_sources`
        self._deltas: list[RequestDelta] = []  # to be delivered
        self._has_aborted = False  # since the last delivery, whose statistics are now outdated
        self._last_error: Exception | None = None  # set if the last step failed
        self._death_error: BaseException | None = None
        self._num_failures = 0
        self._is_closing = False
        self._step_s = 0.0  # duration of the last step
        self.death_reason: str | None = None
        self.made = Future[LLMEngine]()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # -- from any thread

    def add(
        self, request_id: str, token_ids: list[int], params: SamplingParams, options: dict[str, Any]
    ) -> None:
        self._inbox.put((self._enqueue, (request_id, token_ids, params, options)))

    def abort(self, request_id: str) -> None:
        self._inbox.put((self._abort, (request_id,)))

    def call(self, method: Callable[..., Any], *arguments: Any) -> Future:
        """Run `method(engine, *arguments)` between two steps. Returns its result to come."""
        future = Future()
        self._inbox.put((self._call, (future, method, *arguments)))
        return future

    def close(self, timeout_s: float = 10.0) -> None:
        self._inbox.put((self._close, ()))
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
                was_idle = not engine.has_unfinished_requests()
                self._drain_inbox()
                if engine.has_unfinished_requests():
                    if was_idle:
                        self._gather()
                    self._step()
                self._send_update()
        except BaseException as error:
            logger.exception("the engine has stopped")
            self.death_reason = f"the engine has stopped: {type(error).__name__}"
            self._death_error = error
        self.death_reason = self.death_reason or "the engine is closed"
        self._fail_all()
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
        is_dead = self.death_reason is not None
        has_steps = not is_dead and self._engine.has_unfinished_requests()
        must_wait = not (self._new_requests or has_steps)
        while must_wait or not self._inbox.empty():
            self._run_command()
            must_wait = False
        self._add_some()

    def _run_command(self) -> None:
        """Run the next command in the inbox. Blocks until there is one."""
        do, arguments = self._inbox.get()
        do(*arguments)

    def _add_some(self) -> None:
        """Add new requests for at most `MAX_ADD_S`. If a thousand arrive together, the remaining
        ones are added after the next step."""
        end = time.monotonic() + MAX_ADD_S
        while self._new_requests and time.monotonic() < end:
            request_id = next(iter(self._new_requests))
            token_ids, params, options = self._new_requests.pop(request_id)
            self._add(request_id, token_ids, params, options)

    def _gather(self) -> None:
        """Wait briefly for requests that arrive together, so that they start in the same step: a
        request that arrives during a step waits for its end. The wait for the next request is a
        fiftieth of the last step, at most `MAX_GATHER_GAP_S` because that step may have been long;
        for all of them it is a quarter of the step."""
        gap_s = min(self._step_s / 50, MAX_GATHER_GAP_S)
        end = time.monotonic() + self._step_s / 4
        while time.monotonic() < end:
            if self._inbox.empty():  # `get` with a timeout that has just passed blocks forever
                time.sleep(gap_s)
                if self._inbox.empty():
                    break
            self._run_command()
        self._add_some()

    def _step(self) -> None:
        begin = time.monotonic()
        try:
            outputs = self._engine.step()
        except Exception as error:
            logger.exception("a step has failed")
            self._last_error = error
            self._num_failures += 1
            if getattr(error, "is_final", False) or self._num_failures >= MAX_FAILURES:
                raise
            return  # the next step returns the requests that were aborted
        self._step_s = time.monotonic() - begin
        step_error = self._last_error
        self._last_error = None
        for output in outputs:
            if (source := self._sources.get(output.request_id)) is not None:
                self._deltas.append(self._take(source, step_error))
                if self._num_failures and self._deltas[-1].error is None:
                    self._num_failures = 0

    def _take(self, source: DeltaSource, step_error: Exception | None) -> RequestDelta:
        delta = source.take()
        if delta.finished:
            self._remove_source(delta.request_id)
            reasons = {sequence.completion.finish_reason for sequence in source.group.sequences}
            if "abort" in reasons:  # not requested through this loop
                delta.error = EngineError("the request was ended")
            elif "error" in reasons:
                detail = str(source.group.metrics.finish_detail)
                is_clients = detail.startswith(UNCOMPILED) or detail.endswith(NO_TOKEN)
                error = ValueError(detail) if is_clients else EngineError(detail, step_error)
                delta.error = error
        return delta

    def _send_update(self, is_last: bool = False) -> None:
        if not (self._deltas or is_last or self._has_aborted):
            return
        self._has_aborted = False
        update = EngineUpdate(self._deltas, self._engine.stats(), is_last)
        self._deltas = []
        self._deliver(update)

    def _enqueue(self, request_id: str, *arguments: Any) -> None:
        self._new_requests[request_id] = arguments

    def _add(
        self, request_id: str, token_ids: list[int], params: SamplingParams, options: dict[str, Any]
    ) -> None:
        engine = self._engine
        max_waiting = self._max_waiting
        try:
            if self.death_reason is not None:
                raise EngineStopped(self.death_reason, self._death_error)
            num = self._num_sequences
            max_num_seqs = engine.config.max_num_seqs
            if max_waiting is not None and num + params.n > max_num_seqs + max_waiting:
                raise QueueFull(
                    f"the queue is full: {num} sequences run or wait, {max_waiting} may wait"
                )
            group = engine.add_request(request_id, token_ids, params, **options)
        except Exception as error:
            self._deltas.append(RequestDelta(request_id, finished=True, error=error))
            return
        source = self._sources[request_id] = DeltaSource(group)
        self._num_sequences += len(group.sequences)
        self._deltas.append(source.accepted())

    def _abort(self, request_id: str) -> None:
        self._new_requests.pop(request_id, None)
        if request_id in self._sources:
            self._remove_source(request_id)
            self._engine.abort_request(request_id)
            self._has_aborted = True

    def _remove_source(self, request_id: str) -> None:
        self._num_sequences -= len(self._sources.pop(request_id).group.sequences)

    def _call(self, future: Future, method: Callable[..., Any], *arguments: Any) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(method(self._engine, *arguments))
        except Exception as error:
            future.set_exception(error)

    def _close(self) -> None:
        self._is_closing = True

    def _fail_all(self) -> None:
        error = EngineStopped(self.death_reason, self._death_error)
        names = [*self._sources, *self._new_requests]
        self._deltas += [RequestDelta(name, finished=True, error=error) for name in names]
        self._sources.clear()
        self._new_requests.clear()
        self._num_sequences = 0
        self._send_update()
