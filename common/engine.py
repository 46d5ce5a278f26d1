"""`LLMEngine`: the public request API. It validates and tokenizes requests, runs engine steps, and
returns text.

    text -> tokenizer -> Request -> EngineCore (chapter 1) -> OutputProcessor -> text
                                      |
                                      scheduler, KV manager, runner, sampler: see `assembly.py`

A user's request is a group of `n` sequences that share a prompt. Each sequence is a `Request` in
the scheduler and an `OutputProcessor` here. Invariants: a rejected request changes no state; every
unfinished `Request` is in exactly one group; two engines in a process share no state.

See common/README.md"""

from __future__ import annotations

import logging
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from common.assembly.assembly import load_runner, make_engine_parts
from common.engine_config import SHIPPED_CHECKPOINT, EngineConfig, EngineStats
from common.models.loader import LoadedModel
from common.requests.engine_calls import EngineCalls, public
from common.requests.input_processor import InputProcessor, Prompt, RequestOptions, SharedOptions
from common.requests.output_processor import OutputProcessor, RequestGroup, RequestOutput, spread
from common.requests.tokenizer import Tokenizer
from common.sampling.sampling_defaults import sampling_defaults
from prefix_cache import CacheStats, PrefixCache
from request import RequestStatus, SamplingParams
from scheduler_interface import EngineCoreOutput, SchedulerOutput
from step_record import StepRecord, make_record

if TYPE_CHECKING:
    from typing import Unpack

    from common.events.frame_recorder import FrameRecorder
    from common.features.adapters.adapter_names import AdapterNames
    from common.features.grammars.request_grammars import RequestGrammars

CLOSE_TIMEOUT_S = 5.0  # how long `close` waits for a step of another thread
GRAMMAR_WAIT_S = 0.05  # length of a step in which every request waits for its grammar
MAX_IDLE_STEPS = 100  # a forced preemption causes one; steps that wait for external KV do not count

logger = logging.getLogger(__name__)


class LLMEngine(EngineCalls):
    """The engine: accepts requests at any time and returns outputs from every `step()`.

    `on_step` is called with each step's `StepRecord` before the step returns; it may abort requests
    and close the engine, but call nothing else. The engine belongs to the thread and process that
    made it (`engine_calls.py`); `close` can be called from any thread. `loaded`, `draft` and
    `tokenizer` replace the ones that `config` names. Without a tokenizer, prompts are token ids and
    texts are empty."""

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        loaded: LoadedModel | None = None,
        draft: LoadedModel | None = None,
        tokenizer: Tokenizer | None = None,
        on_step: Callable[[StepRecord], None] | None = None,
    ) -> None:
        super().__init__()
        self.config = config = config or EngineConfig()
        self.on_step = on_step
        self._is_closed = False
        self._has_closed_parts = False
        self._to_abort: deque[RequestGroup] = deque()  # when the call ends
        self._groups: dict[str, RequestGroup] = {}
        self._finished_groups: dict[RequestGroup, None] = {}  # not yet returned; in order
        # All sequences of open groups by Request.request_id, finished ones included.
        self._sequences: dict[str, OutputProcessor] = {}
        self._num_idle_steps = 0  # consecutive, up to the last step
        self._num_named = 0  # requests that got a generated id
        self._take_parts(loaded, draft, tokenizer)
        try:
            if config.events is not None:
                self.watch(config.events)
            for name, directory in (config.adapters or {}).items():
                self.load_adapter(name, directory)
        except BaseException:
            self.close()
            raise

    def _take_parts(
        self, loaded: LoadedModel | None, draft: LoadedModel | None, tokenizer: Tokenizer | None
    ) -> None:
        load = load_runner
        if self.config.has_workers:
            from common.parallel.remote import start_runner as load

        runner = load(self.config, loaded, draft, tokenizer)
        # Ends the workers, if there are any, and restores torch's thread count, when this engine is
        # closed or garbage-collected.
        self._close_runner = weakref.finalize(self, runner.close)
        try:
            parts = make_engine_parts(self.config, runner, self._sequences)
        except BaseException:
            self._close_runner()
            raise
        self.parts = parts
        self.tokenizer = runner.tokenizer
        self.core = parts.core
        self.num_steps = 0
        self.scheduler = parts.scheduler
        self.kv_manager = parts.kv_memory
        self.kv_cache = runner.kv_cache
        self.max_model_len = runner.limits.max_model_len
        self.vocab_size = runner.limits.vocab_size
        self.model_config = runner.model_config
        self.device = runner.device
        self.dtype = runner.dtype
        self.num_parameters = runner.num_parameters
        self._input_processor = InputProcessor(
            tokenizer=runner.tokenizer,
            num_embeddings=runner.model_config.vocab_size,
            vocab_size=self.vocab_size,
            eos_token_ids=runner.limits.eos_token_ids,
            max_model_len=self.max_model_len,
            seed=self.config.seed,
        )
        self.grammars: RequestGrammars | None = None  # until the first request has one
        self.frame_recorder: FrameRecorder | None = None  # unless the engine is watched
        self.reset_stats()

    # -- requests

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestGroup:
        """Queue a request. `prompt` is text or token ids; the options are in `RequestOptions`.
        Returns the request, whose `output()` later steps extend. Raises `ValueError` for a request
        that cannot be served, and leaves the state unchanged."""
        adapters = [options.pop("adapter", None)]
        [group] = self.add_requests([(request_id, prompt, sampling_params)], adapters, **options)
        return group

    @public
    def add_requests(
        self,
        requests: Iterable[tuple[str, Prompt, SamplingParams | None]],
        adapters: Iterable[str | None] = repeat(None),
        is_returned: bool = True,
        **options: Unpack[SharedOptions],
    ) -> list[RequestGroup]:
        """Queue all `(request_id, prompt, sampling_params)` or, if one is rejected, none.
        `adapters` has one entry for each request. `is_returned`: `step` returns their outputs."""
        self._check_is_open()
        num_seeds_drawn = self._input_processor.num_seeds_drawn
        groups: list[RequestGroup] = []
        try:
            for (request_id, prompt, params), adapter in zip(requests, adapters):
                params = self.default_sampling_params if params is None else params
                digest = None if adapter is None else self._adapter_names().digest_of(adapter)
                self._check_id(request_id)
                group = self._input_processor.make_group(
                    request_id, prompt, params, adapter=digest, **options
                )
                for sequence in group.sequences:
                    self._check_id(sequence.request_id)  # "name#0" may be another request's
                group.is_returned = is_returned
                groups.append(group)
                self._queue(group)
                self._input_processor.num_seeds_drawn += params.seed is None
        except Exception:  # a rejected request changes no state
            for group in groups:
                self._rollback_add(group)
            self._input_processor.num_seeds_drawn = num_seeds_drawn
            raise
        return groups

    def _queue(self, group: RequestGroup) -> None:
        self._groups[group.request_id] = group
        self._sequences |= {sequence.request_id: sequence for sequence in group.sequences}
        for sequence in group.sequences:
            request = sequence.request
            if self.parts.adapters is not None:
                self.parts.adapters.on_add(request)
            if "grammar" in request.features:
                self._request_grammars().on_add(request)
            if self.frame_recorder is not None:
                self.frame_recorder.on_add(request)
            self.core.add_request(request)

    @cached_property
    def default_sampling_params(self) -> SamplingParams:
        """The parameters of requests that have none. Raises `ValueError`."""
        if defaults := sampling_defaults(self.config):
            logger.info("where a request says nothing, as the model recommends: %s", defaults)
        return SamplingParams(**defaults)

    def _request_grammars(self) -> RequestGrammars:
        if self.grammars is None:
            from common.features.grammars.request_grammars import RequestGrammars

            assert self.tokenizer is not None  # the input processor has refused grammars
            path = self.config.model or SHIPPED_CHECKPOINT
            self.grammars = RequestGrammars(
                tokenizer=self.tokenizer,
                vocab_size=self.vocab_size,
                eos_token_ids=self._input_processor.eos_token_ids,
                scheduler=self.scheduler,
                rank_checkpoint=path if self.config.has_workers else None,
            )
        return self.grammars

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """Abort a request, also from within a call: then when that call ends. Returns its output
        so far, which the next `step` returns too, or None if there is no such request."""
        self._check_owner()
        group = self._groups.get(request_id)
        if group is None:
            return None
        self._abort_group(group)
        return group.output()

    def _abort_group(self, group: RequestGroup) -> None:
        """Abort a group now, or when the call ends that this one is made from. If another thread
        calls (it collects a generator), the next call does it."""
        self._to_abort.append(group)
        if self._is_owner() and not self._is_in_call():
            self._run_deferred()

    @public
    def _run_deferred(self) -> None:
        """A call that does only what every call does at its end."""

    def _finish_call(self) -> None:
        self._do_aborts()
        if self.frame_recorder is not None:
            self.frame_recorder.between_steps()
        if self._is_closed and not self._has_closed_parts:
            self._close_parts()

    def _do_aborts(self) -> None:
        while self._to_abort:
            group = self._to_abort[0]
            if self._groups.get(group.request_id) is group:
                self._end_sequences(group)
            self._to_abort.popleft()  # last, so that an interrupted call does it again

    def _end_sequences(self, group: RequestGroup, error: str | None = None) -> None:
        """Abort what is unfinished of a group, or end it with an error."""
        aborted = RequestStatus.FINISHED_ABORTED
        status = aborted if error is None else RequestStatus.FINISHED_ERROR
        for sequence in group.sequences:
            if not sequence.is_finished:
                self.scheduler.finish_requests(sequence.request_id, status)
                sequence.end(status, error)
        if error is None:
            self._stats.num_aborted += 1
        else:
            self._stats.num_finished += 1
        self._finish_group(group)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do, if only to return an aborted request's output."""
        return bool(self._groups or self._finished_groups)

    @public
    def step(self) -> list[RequestOutput]:
        """Run one engine step. Returns the outputs of requests that finished since the previous
        step (aborted ones included) and of those that made progress, but not of `generate_batch`'s
        and `stream`'s requests.

        If a step raises (out of memory, an interrupt), what it has done is unknown: requests that
        have started end with an error, the prefix cache is emptied, waiting requests stay queued,
        and the engine keeps working. If a rank is lost, the engine cannot continue, and all
        requests end. If `on_step` raises, no request ends. In each case the next step returns the
        outputs that this one could not.
        """
        # If only outputs are left, there is nothing to compute, or the engine is closed.
        progressed: Iterable[RequestGroup] = ()
        if self.core.has_unfinished_requests() or not self._finished_groups:
            touched = self._run_step()
            progressed = [each for each in touched if each.is_returned and not each.finished]
        outputs = [group.output() for group in [*self._finished_groups, *progressed]]
        self._finished_groups.clear()  # last, or an interrupt would lose finished outputs
        return outputs

    @public
    def _advance(self) -> Collection[RequestGroup]:
        """Run one step of a whole call. Returns the groups that it touched."""
        return self._run_step()

    def _run_step(self) -> Collection[RequestGroup]:
        self._check_is_open()
        if self.grammars is not None:
            for request_id, reason in self.grammars.failed_requests().items():
                if (sequence := self._sequences.get(request_id)) is not None:  # else it has failed
                    self._end_sequences(sequence.group, reason)
        touched, record = self._execute_step()
        if self.on_step is not None and record is not None:
            self.on_step(record)
        self._do_aborts()
        return touched

    def _execute_step(self) -> tuple[Collection[RequestGroup], StepRecord | None]:
        """Run one step. Returns the groups that it touched and, if `on_step` is set, its record."""
        start_time = time.monotonic()
        try:
            results = self.core.step()
            record = self._observe_step()
            now = time.monotonic()
            self._update_stats(self.core.last_step.plan, now - start_time)
            touched = self._process_outputs(results, now)
        except Exception as error:  # an interrupt leaves the mark, and the next call recovers
            self._run_recovery(error)
            raise
        if self.frame_recorder is not None:
            self.frame_recorder.flush()
        self._check_progress(self.core.last_step.plan)
        if self.config.check_invariants:
            self._check_invariants()
        return touched, record

    def _observe_step(self) -> StepRecord | None:
        """Make the record of the step that has finished, and give it to the engine's observers.
        Returns None if neither they nor `on_step` want it."""
        observers = self.parts.observers
        record = None
        if observers or self.on_step is not None:
            record = make_record(self.core, self.num_steps)
            for observer in observers:
                observer(record)
        self.num_steps += 1
        return record

    def _process_outputs(
        self, results: Sequence[EngineCoreOutput], now: float
    ) -> Collection[RequestGroup]:
        """Process a step's results and end the groups that have finished. Returns the groups that
        the step touched."""
        touched = dict[RequestGroup, None]()
        step = self.core.last_step
        if scored := step.output.prompt_logprobs:
            for sequence in self._sequences_of(step.plan, scored):
                assert sequence.group.prompt_logprobs is not None
                sequence.group.prompt_logprobs += scored[sequence.request_id]
        for result in results:
            sequence = self._sequences[result.request_id]
            touched[sequence.group] = None
            self._stats.output_tokens += len(result.new_token_ids)
            if sequence.process(result, now):
                status = RequestStatus.FINISHED_STOPPED
                self.core.scheduler.finish_requests(result.request_id, status)
            if sequence.is_finished and sequence.group.finished:
                self._stats.num_finished += 1
                self._finish_group(sequence.group)
        return touched

    def _sequences_of(
        self, plan: SchedulerOutput, request_ids: Collection[str]
    ) -> Iterator[OutputProcessor]:
        """Yield the sequences of these requests of a plan that still exist. The id of an aborted
        request may belong to another request by now, so this compares requests, not ids."""
        for request in plan.scheduled_requests:
            if request.request_id in request_ids:
                sequence = self._sequences.get(request.request_id)
                if sequence is not None and sequence.request is request:
                    yield sequence

    def _check_progress(self, plan: SchedulerOutput) -> None:
        """Raise `RuntimeError` if requests wait and nothing in flight can lead to an admission."""
        num_running, num_waiting = self.core.get_request_counts()
        is_busy = plan.num_scheduled_tokens or num_running or not num_waiting
        if not is_busy and self.grammars is not None:
            is_busy = self.grammars.wait(GRAMMAR_WAIT_S)
        if is_busy or self.kv_manager.num_blocks_in_use:  # KV that is being loaded holds blocks
            self._num_idle_steps = 0
            return
        self._num_idle_steps += 1
        if self._num_idle_steps >= MAX_IDLE_STEPS:
            waiting = ", ".join(map(repr, self.scheduler.requests))
            raise RuntimeError(
                f"no progress for {self._num_idle_steps} steps: no request is running, the KV "
                f"cache is empty, and the scheduler admitted none of {waiting}"
            )

    def _recover(self, error: BaseException | None) -> None:
        if self.frame_recorder is not None:
            self.frame_recorder.on_error(error)
        if self.parts.multi_step_core is not None:
            self.parts.multi_step_core.give_up()
        self.kv_manager.clear()
        self.scheduler.clear()
        is_final = getattr(error, "is_final", False)
        reason = "a call of the engine was interrupted"
        if isinstance(error, Exception):
            reason = f"a step with this request has failed: {type(error).__name__}"
        for group in list(self._groups.values()):
            unfinished = {
                sequence.request_id for sequence in group.sequences if not sequence.is_finished
            }
            if not unfinished:
                self._finish_group(group)
            elif is_final or not unfinished <= self.scheduler.requests.keys():
                self._end_sequences(group, reason)

    # -- whole calls

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_finished: Callable[[int], object] | None = None,
        adapter: str | Sequence[str | None] | None = None,
        **options: Unpack[SharedOptions],
    ) -> dict[str, RequestOutput]:
        """Run prompts until all are finished. Returns the outputs by request id, in the order of
        the prompts. After each step, `on_finished` gets the number of requests that finished in it.
        The other options are those of `add_request`.

        Other requests in the engine advance in the same steps; if they finish, the next `step`
        returns them. Raises `ValueError`, and queues no prompt, if one of the prompts cannot be
        served. Interrupting the call aborts its requests."""
        n = len(prompts)
        params = self.default_sampling_params if params is None else params
        per_prompt = spread("sampling_params", params, n, SamplingParams)
        adapters = spread("adapter", adapter, n, str)
        ids = [self._new_id() for _ in prompts]
        requests = zip(ids, prompts, per_prompt, strict=True)
        try:
            groups = self.add_requests(requests, adapters, is_returned=False, **options)
            own = set(groups)
            for group in groups:
                while not group.finished:
                    touched = self._advance()
                    if on_finished is not None:
                        on_finished(sum(each.finished and each in own for each in touched))
        finally:
            self._abort_unfinished(ids)
        return {group.request_id: group.output() for group in groups}

    def _abort_unfinished(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            group = self._groups.get(request_id)
            if group is not None and not group.is_returned:  # else a later request of this id
                self._abort_group(group)

    def _new_id(self) -> str:
        """Return a request id that no unfinished request has."""
        while True:
            request_id = f"request-{self._num_named}"
            self._num_named += 1
            if request_id not in self._groups and request_id not in self._sequences:
                return request_id

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> Iterator[str]:
        """Run one prompt and yield its text as the text becomes final. The remaining text is
        yielded however the request ends. Leaving the loop early aborts the request."""
        request_id = self._new_id()
        adapters = [options.pop("adapter", None)]
        try:
            requests = [(request_id, prompt, params)]
            [group] = self.add_requests(requests, adapters, is_returned=False, **options)
            while not group.finished:
                if delta := self._take_delta(group):
                    yield delta
                else:
                    self._advance()
            if delta := self._take_delta(group):
                yield delta
        finally:
            self._abort_unfinished([request_id])

    @public
    def _take_delta(self, group: RequestGroup) -> str:
        return group.sequences[0].take_delta()

    # -- adapters

    @public
    def load_adapter(self, name: str, directory: str | Path) -> None:
        """Load a LoRA adapter in PEFT's format, for requests that name it. Raises `ValueError` or
        `FileNotFoundError`, and changes nothing, if the adapter cannot be computed exactly."""
        self._adapter_names().load(name, directory)

    @public
    def unload_adapter(self, name: str) -> None:
        """Remove an adapter for future requests. Requests that already use it keep it."""
        self._adapter_names().unload(name)

    @property
    def adapters(self) -> list[str]:
        """Names of the loaded adapters."""
        return [] if self.parts.adapters is None else self.parts.adapters.names

    @property
    def adapters_by_digest(self) -> dict[str, list[str]]:
        """The names of each adapter, by the digest that its KV is keyed by."""
        return {} if self.parts.adapters is None else self.parts.adapters.by_digest

    def _adapter_names(self) -> AdapterNames:
        self._check_is_open()
        if self.parts.adapters is None:
            raise ValueError("cannot use adapters: the engine has no max_loras or adapters")
        return self.parts.adapters

    # -- statistics and observation

    def stats(self) -> EngineStats:
        """Return a copy of the totals and the current state."""
        running, waiting = self.core.get_request_counts()
        stats = replace(
            self._stats,
            num_running=running,
            num_waiting=waiting,
            kv_blocks_in_use=self.kv_manager.num_blocks_in_use,
        )
        if (plans := self.parts.in_flight_plans) is not None:
            stats.discarded_tokens = plans.num_discarded_tokens
        if (cache := self.prefix_cache) is not None:
            stats.kv_blocks_cached = cache.num_cached_blocks
            stats.looked_up_tokens = cache.stats.num_tokens_looked_up
            stats.cached_tokens = cache.stats.num_tokens_hit
            stats.prefix_cache_hit_rate = cache.stats.hit_rate
        if (drafts := self.parts.drafts) is not None:
            spec_stats = drafts.stats
            stats.num_passes = spec_stats.num_passes
            stats.num_drafted_passes = spec_stats.num_drafted_passes
            stats.num_drafted_tokens = spec_stats.num_drafted
            stats.num_accepted_tokens = spec_stats.num_accepted
            stats.acceptance_by_position = spec_stats.acceptance_by_position
            stats.mean_accepted_length = spec_stats.mean_accepted_length
            stats.tokens_per_pass = spec_stats.tokens_per_pass
        return stats

    @property
    def prefix_cache(self) -> PrefixCache | None:
        return self.kv_manager.cache

    @public
    def reset_prefix_cache(self) -> bool:
        """Clear the prefix cache. Returns False, and changes nothing, while requests use blocks."""
        return self.kv_manager.reset_prefix_cache()

    @public
    def watch(self, events: str | Path | TextIO) -> FrameRecorder:
        """Write each step's frames to this file or text stream from now on, as
        `EngineConfig(events=...)` does from the start (`common/events`). In a running engine, the
        first frame is its whole state. A previous watch ends. Raises `ValueError` or
        `FileNotFoundError` for a path where no file can be written."""
        from common.events.frame_recorder import FrameRecorder
        from common.events.run_line import check_place

        check_place(events)
        self._remove_watch()
        self.frame_recorder = FrameRecorder(
            events,
            config=self.config,
            parts=self.parts,
            members=self._sequences,
            tokenizer=self.tokenizer,
        )
        return self.frame_recorder

    @public
    def unwatch(self) -> None:
        """Stop writing events and close the file. No effect if events are not being written."""
        self._remove_watch()

    def _remove_watch(self) -> None:
        if self.frame_recorder is not None:
            self.frame_recorder.take_out()
            self.frame_recorder = None

    def close(self) -> None:
        """Stop the connector's threads, close its files and end the workers. The engine computes
        nothing afterwards. From within a call of the engine: when that call ends. From another
        thread: waits up to `CLOSE_TIMEOUT_S` for the call that is running."""
        self._check_process()
        self._is_closed = True
        end_time = time.monotonic() + CLOSE_TIMEOUT_S
        while not self._is_owner() and self._is_in_call() and time.monotonic() < end_time:
            time.sleep(0.005)
        if not self._is_in_call():
            self._begin_call(sys._getframe())
            self._end_call()
        elif not self._is_owner():
            self._close_outside()

    def _close_parts(self) -> None:
        try:
            for group in list(self._groups.values()):
                self._end_sequences(group)
            if self.parts.multi_step_core is not None:
                self.parts.multi_step_core.close()
            self._remove_watch()
        finally:
            self._close_outside()
        self._has_closed_parts = True

    def _close_outside(self) -> None:
        """Close what a step that does not end can wait for."""
        if self.parts.connector is not None:
            self.parts.connector.close()
        if self.grammars is not None:
            self.grammars.close()
        self._close_runner()

    @public
    def reset_stats(self) -> None:
        """Reset the counters, for example after a warm-up. The prefix cache is kept."""
        if self.prefix_cache is not None:
            self.prefix_cache.stats = CacheStats()
        if self.parts.drafts is not None:
            self.parts.drafts.reset_stats()
        if self.parts.in_flight_plans is not None:
            self.parts.in_flight_plans.num_discarded_tokens = 0
        self._stats = EngineStats(kv_blocks_total=self.kv_manager.pool.num_usable_blocks)

    @public
    def check_invariants(self) -> None:
        """Raise `AssertionError` if the state of the engine's parts is inconsistent."""
        self._check_invariants()

    def _check_invariants(self) -> None:
        self.scheduler.check_invariants()
        self.kv_manager.check_invariants(self.scheduler.running.values())
        unfinished = {r for r, sequence in self._sequences.items() if not sequence.is_finished}
        assert unfinished == set(self.scheduler.requests)
        grouped = [sequence for group in self._groups.values() for sequence in group.sequences]
        assert set(grouped) == set(self._sequences.values())
        assert not any(group.finished for group in self._groups.values())
        assert self.scheduler.requests or self.kv_manager.num_blocks_in_use == 0, "blocks leaked"

    def _update_stats(self, plan: SchedulerOutput, seconds: float) -> None:
        stats = self._stats
        num_tokens = plan.total_num_scheduled_tokens
        stats.num_steps += 1
        stats.busy_time += seconds
        stats.scheduled_tokens += num_tokens
        if admitted := {new.req_id: new for new in plan.scheduled_new_reqs}:
            stats.prompt_tokens += sum(len(new.prompt_token_ids) for new in admitted.values())
            for sequence in self._sequences_of(plan, admitted):
                metrics = sequence.group.metrics
                if metrics.first_scheduled_time is None:
                    metrics.first_scheduled_time = self.core.last_step.clock.start_time
        stats.num_preemptions += len(plan.preempted_requests)
        stats.recomputed_tokens += plan.num_recomputed_tokens
        stats.kv_blocks_peak = max(stats.kv_blocks_peak, plan.num_kv_blocks_in_use)
        slots = plan.num_kv_blocks_in_use * self.config.block_size
        # Each sequence counts a shared prompt, so `written` can exceed the slots that are held.
        written = self.kv_manager.num_written_slots(plan.start_positions, num_tokens)
        waste = max(0.0, 1 - written / slots) if slots else 0.0
        stats.kv_waste += (waste - stats.kv_waste) / stats.num_steps

    def _check_is_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("the engine is closed; create a new one")

    def _check_id(self, request_id: str) -> None:
        if not isinstance(request_id, str) or not request_id:
            raise ValueError(f"request_id must be a non-empty str, got {request_id!r}")
        if request_id in self._groups or request_id in self._sequences:
            raise ValueError(f"request_id must be unique, got {request_id!r}, which is in use")

    def _finish_group(self, group: RequestGroup) -> None:
        """Close a finished group and queue its output. Can be interrupted and called again."""
        if group.is_returned:
            self._finished_groups[group] = None
        for sequence in group.sequences:
            self._sequences.pop(sequence.request_id, None)
            if self.parts.adapters is not None:
                self.parts.adapters.on_finish(sequence.request)
            if self.grammars is not None:
                self.grammars.on_finish(sequence.request)
        self._groups.pop(group.request_id, None)

    def _rollback_add(self, group: RequestGroup) -> None:
        """Undo an `add_request` that no step has seen yet."""
        ids = [sequence.request_id for sequence in group.sequences]
        self.scheduler.finish_requests(ids, RequestStatus.FINISHED_ABORTED)
        self._finish_group(group)
        self._finished_groups.pop(group, None)
