"""`LLMEngine`: text in, text out, and everything that users can ask or get wrong in between.

    text -> tokenizer -> Request -> EngineCore (chapter 1) -> OutputProcessor -> text
                                      |
                                      scheduler, KV manager, runner, sampler: see `assembly.py`

A user's request is a group of `n` sequences that share a prompt. Each sequence is one `Request` to
the scheduler and one `OutputProcessor` here; the group is what the user sees again, as a
`RequestOutput`.

Invariants: a request that is refused leaves everything as it was; every unfinished `Request`
belongs to exactly one group; two engines in one process share nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from common.assembly import assemble
from common.engine_config import SHIPPED_CHECKPOINT, SHIPPED_DRAFT, EngineConfig, EngineStats
from common.intake import Intake, Prompt
from common.loader import LoadedModel, load_model
from common.outputs import OutputProcessor, RequestGroup, RequestOutput, spread_params
from common.tokenizer import Tokenizer, load_tokenizer
from prefix_cache import CacheStats, PrefixCache
from request import RequestStatus, SamplingParams
from step_record import StepRecord


class LLMEngine:
    """Requests in at any time, outputs out of every `step()`.

    `on_step` is called with each step's `StepRecord`, when the step is complete: it may add and
    abort requests, but not call `step()`. `loaded`, `draft` and `tokenizer` replace what
    `config` names (benchmarks and tests bring random weights this way); without a tokenizer,
    prompts are token ids and texts are empty.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        loaded: LoadedModel | None = None,
        draft: LoadedModel | None = None,
        tokenizer: Tokenizer | None = None,
        on_step: Callable[[StepRecord], None] | None = None,
    ) -> None:
        self.config = config or EngineConfig()
        if loaded is None:
            model = SHIPPED_CHECKPOINT if self.config.model is None else self.config.model
            loaded = load_model(model, self.config.dtype, self.config.resolve_device())
            assert loaded.path is not None
            tokenizer = tokenizer or load_tokenizer(loaded.path)
        self.model_config = loaded.config
        self.eos_token_ids = tuple(loaded.generation_eos_token_ids)
        self.tokenizer = tokenizer
        self.on_step = on_step
        num_tokens = None if tokenizer is None else tokenizer.vocab_size
        draft = self._resolve_draft(loaded, draft)
        observers = [self._after_step]
        parts = assemble(self.config, loaded, draft, num_tokens, observers, self._num_wanted)
        self._connector, self.speculation = parts.connector, parts.speculation
        self.core, self.scheduler = parts.core, parts.core.scheduler
        self.kv_manager, self.kv_cache = parts.kv_memory, parts.kv_cache
        self.max_model_len, self.vocab_size = parts.max_model_len, parts.vocab_size

        self.device, self.dtype = loaded.model.embed_weight.device, loaded.model.embed_weight.dtype
        self.num_parameters = loaded.model.num_parameters
        self._intake = Intake(
            tokenizer,
            self.model_config.vocab_size,
            self.vocab_size,
            self.eos_token_ids,
            self.config.seed,
        )
        self.reset_stats()
        self._groups: dict[str, RequestGroup] = {}
        # By Request.request_id: all members of open groups, those that have finished included.
        self._owners: dict[str, tuple[RequestGroup, OutputProcessor]] = {}
        self._ended: dict[RequestGroup, None] = {}  # and not reported yet; in order
        self._last_record: StepRecord  # there is none before the first step
        self._num_batches = 0

    def _resolve_draft(self, loaded: LoadedModel, draft: LoadedModel | None) -> LoadedModel | None:
        how = self.config.speculation
        if how is None or how.method != "draft":
            return None
        if draft is not None:
            return draft
        weight = loaded.model.embed_weight
        return load_model(how.model or SHIPPED_DRAFT, weight.dtype, weight.device)

    # -- requests

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        arrival_time: float | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        """Queue a request. `prompt` is text or token ids; `arrival_time` is in seconds of
        `time.monotonic()`, now if None. Only requests with an equal `cache_salt` share cached
        prefixes: one for each tenant keeps them from probing each other's.

        Raises `ValueError` for anything that can not be served; nothing has changed then.
        """
        params = sampling_params if sampling_params is not None else SamplingParams()
        self._check_id(request_id)
        group, requests = self._intake.make_group(
            request_id, prompt, params, arrival_time, priority, cache_salt
        )
        for request in requests:
            self._check_id(request.request_id)  # of a sample: "name#0" may be somebody's name
        added: list[str] = []
        try:
            for request in requests:
                self.core.add_request(request)
                added.append(request.request_id)
        except ValueError:
            self.scheduler.finish_requests(added, RequestStatus.FINISHED_ABORTED)
            raise
        self._intake.num_seeds_drawn += params.seed is None
        self._groups[request_id] = group
        for request, member in zip(requests, group.members, strict=True):
            self._owners[request.request_id] = (group, member)

    def add_requests(
        self,
        requests: Iterable[tuple[str, Prompt, SamplingParams]],
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        """Queue all of `(request_id, prompt, sampling_params)` or, if one is refused, none."""
        added: list[str] = []
        num_seeds_drawn = self._intake.num_seeds_drawn
        try:
            for request_id, prompt, params in requests:
                self.add_request(
                    request_id, prompt, params, priority=priority, cache_salt=cache_salt
                )
                added.append(request_id)
        except BaseException:
            for request_id in added:
                self._drop(request_id)
            self._intake.num_seeds_drawn = num_seeds_drawn
            raise

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request at any moment. Its output so far, which the next `step` returns too, or
        None if there is no such request."""
        group = self._groups.get(request_id)
        if group is None:
            return None
        for member in group.members:
            if not member.is_finished:
                self.scheduler.abort_request(member.request.request_id)
                member.abort()
        self._stats.num_aborted += 1
        self._end(group)
        return group.output()

    def has_unfinished_requests(self) -> bool:
        """Is there anything to do for `step`, if only to return the output of an aborted one?"""
        return self.core.has_unfinished_requests() or bool(self._ended)

    def step(self) -> list[RequestOutput]:
        """One iteration for everybody. The outputs of the requests that have ended since the last
        one, aborted ones included, and of those that made progress. An output's completions are
        alive: they grow with later steps.

        If a step raises (out of memory, an interrupt), nobody can say how far its requests have
        come: they are aborted, the waiting ones stay, and the engine goes on. If `on_step` raises,
        nobody is aborted. Either way the next step returns what this one could not.
        """
        going_on = self._advance()
        groups = [*self._ended, *going_on]
        self._ended.clear()
        return [group.output() for group in groups]

    def _advance(self) -> list[RequestGroup]:
        """One iteration. The unfinished groups that made progress; the others are in `_ended`."""
        try:
            results = self.core.step()
        except BaseException:
            self._abort_running()
            raise
        now = time.monotonic()
        touched: dict[RequestGroup, None] = {}
        for result in results:
            group, member = self._owners[result.request_id]
            num_before = len(member.completion.token_ids)
            if member.process(result, now):
                self.scheduler.finish_requests(result.request_id, RequestStatus.FINISHED_STOPPED)
            self._stats.output_tokens += len(member.completion.token_ids) - num_before
            touched[group] = None
        for group in touched:
            if group.is_finished:
                self._stats.num_finished += 1
                self._end(group)
        if self.config.check_invariants:
            self.check_invariants()
        if self.on_step is not None:
            self.on_step(self._last_record)
        return [group for group in touched if not group.is_finished]

    def _abort_running(self) -> None:
        """Those that the step may have changed: they run, or the scheduler has just let them go."""
        scheduler = self.scheduler
        for group in list(self._groups.values()):
            ids = [m.request.request_id for m in group.members if not m.is_finished]
            if any(i in scheduler.running or i not in scheduler.requests for i in ids):
                self.abort_request(group.request_id)

    # -- whole calls

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        cache_salt: str | None = None,
        request_ids: Sequence[str] | None = None,
        on_finished: Callable[[int], object] | None = None,
    ) -> dict[str, RequestOutput]:
        """Run prompts to their end. The outputs by request id, in the order of the prompts.
        `on_finished` is told after each step how many of them ended in it.

        Other requests in the engine advance with them, and if they end, the next `step` returns
        them. Raises `ValueError` if one of the prompts can not be served; none of them is queued
        then. Interrupting the call aborts its requests."""
        per_prompt = spread_params(params, len(prompts))
        if request_ids is None:
            self._num_batches += 1
            request_ids = [f"batch{self._num_batches}-{i}" for i in range(len(prompts))]
        self.add_requests(zip(request_ids, prompts, per_prompt, strict=True), cache_salt=cache_salt)
        own = dict.fromkeys(self._groups[request_id] for request_id in request_ids)
        try:
            for group in own:
                while not group.is_finished:
                    self._advance()
                    num_finished = self._forget_ended(own)
                    if on_finished is not None and num_finished:
                        on_finished(num_finished)
        finally:
            self._withdraw(own)
        return {group.request_id: group.output() for group in own}

    def stream(
        self, request_id: str, prompt: Prompt, params: SamplingParams | None = None
    ) -> Iterator[str]:
        """Run one prompt, and yield its text as it becomes final. However the request ends, the
        rest of its text is yielded. Leaving the loop early aborts it."""
        self.add_request(request_id, prompt, params)
        group = self._groups[request_id]
        member = group.members[0]
        try:
            while not group.is_finished:
                if delta := member.take_delta():
                    yield delta
                else:
                    self._advance()
            if rest := member.take_delta():
                yield rest
        finally:
            self._withdraw([group])

    def _forget_ended(self, groups: Collection[RequestGroup]) -> int:
        """Their caller holds them, so no step returns them. How many of them had ended."""
        ended = [group for group in self._ended if group in groups]
        for group in ended:
            del self._ended[group]
        return len(ended)

    def _withdraw(self, groups: Collection[RequestGroup]) -> None:
        for group in groups:
            if not group.is_finished:
                self.abort_request(group.request_id)
        self._forget_ended(groups)

    # -- what it is doing

    def stats(self) -> EngineStats:
        """Totals and the present state. A copy."""
        running, waiting = self.core.get_request_counts()
        steps = self._stats.num_steps
        return replace(
            self._stats,
            num_running=running,
            num_waiting=waiting,
            kv_blocks_in_use=self.kv_manager.num_blocks_in_use,
            **self._cache_stats(),
            **self._speculation_stats(),
            kv_waste=self._waste_sum / steps if steps else 0.0,
        )

    def _cache_stats(self) -> dict[str, int | float]:
        cache = self.prefix_cache
        if cache is None:
            return {}
        return {
            "kv_blocks_cached": cache.num_cached_blocks,
            "cached_tokens": cache.stats.num_tokens_hit,
            "prefix_cache_hit_rate": cache.stats.hit_rate,
        }

    def _speculation_stats(self) -> dict[str, int | float | list[float]]:
        if self.speculation is None:
            return {}
        seen = self.speculation.stats
        return {
            "num_passes": seen.num_passes,
            "num_drafted_tokens": seen.num_drafted,
            "num_accepted_tokens": seen.num_accepted,
            "acceptance_by_position": seen.acceptance_by_position,
            "mean_accepted_length": seen.mean_accepted_length,
            "tokens_per_pass": seen.tokens_per_pass,
        }

    @property
    def prefix_cache(self) -> PrefixCache | None:
        return self.kv_manager.cache

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix. False, and nothing has changed, while requests use some."""
        return self.kv_manager.reset_prefix_cache()

    def close(self) -> None:
        """Stop the connector's threads and close its files. The engine computes nothing after."""
        for request_id in list(self._groups):
            self.abort_request(request_id)
        if self._connector is not None:
            self._connector.close()

    def reset_stats(self) -> None:
        """Start counting anew, after a warm-up for instance. What is cached stays cached."""
        if self.prefix_cache is not None:
            self.prefix_cache.stats = CacheStats()
        if self.speculation is not None:
            self.speculation.reset_stats()
        self._stats = EngineStats(kv_blocks_total=self.kv_manager.pool.num_usable_blocks)
        self._waste_sum = 0.0

    def check_invariants(self) -> None:
        """Raise `AssertionError` if a part contradicts itself or another."""
        self.scheduler.check_invariants()
        self.kv_manager.check_invariants(self.scheduler.running.values())
        unfinished = {r for r, (_, member) in self._owners.items() if not member.is_finished}
        assert unfinished == set(self.scheduler.requests)
        assert len(self._owners) == sum(len(group.members) for group in self._groups.values())
        for request_id, (group, member) in self._owners.items():
            assert self._groups[group.request_id] is group and not group.is_finished, request_id
            assert member in group.members and member.request.request_id == request_id, request_id
        assert all(group.is_finished for group in self._ended)
        assert self.scheduler.requests or self.kv_manager.num_blocks_in_use == 0, "blocks leaked"

    def _after_step(self, record: StepRecord) -> None:
        stats = self._stats
        stats.num_steps += 1
        stats.busy_time += record.step_ms / 1e3
        stats.scheduled_tokens += sum(record.num_scheduled_tokens.values())
        for request_id in record.admitted:
            member = self._owners[request_id][1]
            stats.prompt_tokens += member.request.num_prompt_tokens
            member.metrics.first_scheduled_time = record.start_time
        stats.num_preemptions += len(record.preempted)
        stats.recomputed_tokens += record.num_recomputed_tokens
        stats.kv_blocks_peak = max(stats.kv_blocks_peak, record.kv_blocks_in_use)
        slots = record.kv_blocks_in_use * self.config.block_size
        # Sequences that share a prompt count it each, so what is written can exceed what is held.
        self._waste_sum += max(0.0, 1 - record.kv_tokens_written / slots) if slots else 0.0
        self._last_record = record

    def _num_wanted(self, request_id: str, token_ids: list[int]) -> int:
        """Of a run of tokens: those up to the end of a stop string."""
        return self._owners[request_id][1].num_wanted(token_ids)

    def _check_id(self, request_id: str) -> None:
        if not isinstance(request_id, str) or not request_id:
            raise ValueError(f"request_id is {request_id!r}: it must be a non-empty str")
        if request_id in self._groups or request_id in self._owners:
            raise ValueError(f"request_id is {request_id!r}: a request with this id is unfinished")

    def _end(self, group: RequestGroup) -> None:
        self._ended[group] = None
        self._close(group)

    def _close(self, group: RequestGroup) -> None:
        for member in group.members:
            del self._owners[member.request.request_id]
        del self._groups[group.request_id]

    def _drop(self, request_id: str) -> None:
        """Undo an `add_request` before any step saw it."""
        group = self._groups[request_id]
        ids = [member.request.request_id for member in group.members]
        self.scheduler.finish_requests(ids, RequestStatus.FINISHED_ABORTED)
        self._close(group)
