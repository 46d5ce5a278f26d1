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

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from numbers import Integral, Real

from common.assembly import assemble
from common.engine_config import SHIPPED_CHECKPOINT, EngineConfig, EngineStats
from common.loader import LoadedModel, load_model
from common.output_processor import OutputProcessor
from common.request_group import RequestGroup, spread_params
from common.tokenizer import Tokenizer, load_tokenizer
from engine_core import StepRecord
from request import Request, RequestOutput, RequestStatus, SamplingParams

Prompt = str | Sequence[int]


class LLMEngine:
    """Requests in at any time, outputs out of every `step()`.

    `on_step` is called with each step's `StepRecord`, when the step is complete: it may add and
    abort requests, but not call `step()`. `loaded` and `tokenizer` replace what
    `config.model` names (benchmarks and tests bring random weights this way); without a tokenizer,
    prompts are token ids and texts are empty.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        loaded: LoadedModel | None = None,
        tokenizer: Tokenizer | None = None,
        on_step: Callable[[StepRecord], None] | None = None,
    ) -> None:
        self.config = config or EngineConfig()
        if loaded is None:
            model = SHIPPED_CHECKPOINT if self.config.model is None else self.config.model
            loaded = load_model(model, self.config.dtype, self.config.resolve_device())
            tokenizer = tokenizer or load_tokenizer(loaded.path)
        self.model_config = loaded.config
        self.eos_token_ids = tuple(loaded.generation_eos_token_ids)
        self.tokenizer = tokenizer
        self.on_step = on_step
        num_tokens = None if tokenizer is None else tokenizer.vocab_size
        parts = assemble(self.config, loaded, num_tokens, self._after_step)
        self.core, self.scheduler = parts.core, parts.scheduler
        self.kv_manager, self.kv_cache = parts.kv_manager, parts.kv_cache
        self.max_model_len, self.vocab_size = parts.max_model_len, parts.vocab_size

        self.device, self.dtype = loaded.model.embed_weight.device, loaded.model.embed_weight.dtype
        self.num_parameters = sum(p.numel() for p in loaded.model.parameters())
        self.reset_stats()
        self._groups: dict[str, RequestGroup] = {}
        # By Request.request_id: all members of open groups, those that have finished included.
        self._owners: dict[str, tuple[RequestGroup, OutputProcessor]] = {}
        self._aborted: list[RequestGroup] = []  # since the last step
        self._last_record: StepRecord | None = None
        self._num_seeds_drawn = 0
        self._num_batches = 0

    # -- requests

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        arrival_time: float | None = None,
        priority: int = 0,
    ) -> None:
        """Queue a request. `prompt` is text or token ids; `arrival_time` is in seconds of
        `time.monotonic()`, now if None.

        Raises `ValueError` for anything that can not be served; nothing has changed then.
        """
        params = sampling_params if sampling_params is not None else SamplingParams()
        self._check_id(request_id)
        self._check_params(params)
        arrival_time = time.monotonic() if arrival_time is None else arrival_time
        if not isinstance(arrival_time, Real) or not math.isfinite(arrival_time):
            raise ValueError(f"arrival_time is {arrival_time!r}: it must be a number of seconds")
        if not isinstance(priority, Integral):
            raise ValueError(f"priority is {priority!r}: it must be an integer")
        token_ids = self._to_token_ids(prompt)
        group = RequestGroup(request_id, prompt if isinstance(prompt, str) else None, token_ids)
        requests = self._make_requests(group, params, arrival_time, priority)
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
        self._num_seeds_drawn += params.seed is None
        self._groups[request_id] = group
        for request, member in zip(requests, group.members, strict=True):
            self._owners[request.request_id] = (group, member)

    def add_requests(
        self, requests: Iterable[tuple[str, Prompt, SamplingParams]], priority: int = 0
    ) -> None:
        """Queue all of `(request_id, prompt, sampling_params)` or, if one is refused, none."""
        added: list[str] = []
        num_seeds_drawn = self._num_seeds_drawn
        try:
            for request_id, prompt, params in requests:
                self.add_request(request_id, prompt, params, priority=priority)
                added.append(request_id)
        except BaseException:
            for request_id in added:
                self._drop(request_id)
            self._num_seeds_drawn = num_seeds_drawn
            raise

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request at any moment. Its output so far, or None if there is no such request."""
        group = self._groups.get(request_id)
        if group is None:
            return None
        for member in group.members:
            if not member.is_finished:
                self.scheduler.abort_request(member.request.request_id)
                member.abort()
        self._stats.num_aborted += 1
        self._aborted.append(group)
        self._close(group)
        return group.output()

    def has_unfinished_requests(self) -> bool:
        return self.core.has_unfinished_requests()

    def step(self) -> list[RequestOutput]:
        """One iteration for everybody. The outputs of the requests that made progress, and of those
        that `on_step` aborted. An output's completions are alive: they grow with later steps.

        If a step raises (out of memory, an interrupt, logits that are NaN), nobody can say how far
        its requests have come: they are aborted, the waiting ones stay, and the engine goes on.
        """
        try:
            results = self.core.step()
        except BaseException:
            self._abort_running()
            raise
        now = time.monotonic()
        touched: dict[str, RequestGroup] = {}
        for result in results:
            group, member = self._owners[result.request_id]
            num_before = len(member.completion.token_ids)
            if member.process(result, now):
                self.scheduler.finish_requests(result.request_id, RequestStatus.FINISHED_STOPPED)
            self._stats.output_tokens += len(member.completion.token_ids) - num_before
            touched[group.request_id] = group
        for group in touched.values():
            if group.is_finished:
                self._stats.num_finished += 1
                self._close(group)
        if self.config.check_invariants:
            self.check_invariants()
        self._aborted.clear()
        if self.on_step is not None:
            self.on_step(self._last_record)
        touched |= {group.request_id: group for group in self._aborted}
        return [group.output() for group in touched.values()]

    def _abort_running(self) -> None:
        for group in list(self._groups.values()):
            if any(m.request.request_id in self.scheduler.running for m in group.members):
                self.abort_request(group.request_id)

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams],
    ) -> dict[str, RequestOutput]:
        """Run prompts to their end. The outputs by request id, in the order of the prompts.

        Other requests in the engine advance with them. Raises `ValueError` if one of the prompts
        can not be served; none of them is queued then. Interrupting the call aborts them."""
        per_prompt = spread_params(params, len(prompts))
        self._num_batches += 1
        ids = [f"batch{self._num_batches}-{i}" for i in range(len(prompts))]
        self.add_requests(zip(ids, prompts, per_prompt, strict=True))
        outputs: dict[str, RequestOutput | None] = dict.fromkeys(ids)
        num_open = len(ids)
        try:
            while num_open:
                for output in self.step():
                    if output.finished and output.request_id in outputs:
                        outputs[output.request_id] = output
                        num_open -= 1
        finally:
            for request_id in ids:
                self.abort_request(request_id)
        return outputs

    def take_delta(self, request_id: str) -> str:
        """Text of a running request's first sequence that became final since the last call."""
        return self._groups[request_id].members[0].take_delta()

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
            kv_waste=self._waste_sum / steps if steps else 0.0,
        )

    def reset_stats(self) -> None:
        """Start counting anew, after a warm-up for instance."""
        self._stats = EngineStats(kv_blocks_total=self.kv_manager.pool.num_blocks - 1)
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
        assert self.scheduler.running or self.kv_manager.num_blocks_in_use == 0, "blocks leaked"

    def _after_step(self, record: StepRecord) -> None:
        stats = self._stats
        stats.num_steps += 1
        stats.busy_time += record.step_ms / 1e3
        stats.scheduled_tokens += sum(record.num_scheduled_tokens.values())
        for request_id in record.admitted:
            member = self._owners[request_id][1]
            stats.prompt_tokens += member.request.num_prompt_tokens
            member.metrics.first_scheduled_time = record.start_time
        stats.kv_blocks_peak = max(stats.kv_blocks_peak, record.kv_blocks_in_use)
        slots = record.kv_blocks_in_use * self.config.block_size
        # Sequences that share a prompt count it each, so what is written can exceed what is held.
        self._waste_sum += max(0.0, 1 - record.kv_tokens_written / slots) if slots else 0.0
        self._last_record = record

    # -- intake

    def _check_id(self, request_id: str) -> None:
        if not isinstance(request_id, str) or not request_id:
            raise ValueError(f"request_id is {request_id!r}: it must be a non-empty str")
        if request_id in self._groups or request_id in self._owners:
            raise ValueError(f"request_id is {request_id!r}: a request with this id is unfinished")

    def _check_params(self, params: SamplingParams) -> None:
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params is {params!r}: it must be a SamplingParams")
        self._check_token_ids("stop_token_ids", params.stop_token_ids)
        if params.min_tokens > 0:
            forbidden = {*params.stop_token_ids, *(() if params.ignore_eos else self.eos_token_ids)}
            if forbidden.issuperset(range(self.vocab_size)):
                raise ValueError(
                    f"min_tokens is {params.min_tokens}: it must be 0 if every token stops"
                )

    def _make_requests(
        self, group: RequestGroup, params: SamplingParams, arrival_time: float, priority: int
    ) -> list[Request]:
        seed = self._next_seed() if params.seed is None else params.seed
        first_id = group.request_id if params.n == 1 else f"{group.request_id}#0"
        requests = []
        for i in range(params.n):
            request = Request(
                first_id if i == 0 else f"{group.request_id}#{i}",
                group.prompt_token_ids,
                replace(params, seed=_wrap_to_int64(seed + i)),
                self.eos_token_ids,
                arrival_time,
                priority,
                parent_id=first_id if i > 0 else None,
            )
            requests.append(request)
            group.members.append(OutputProcessor(request, i, self.tokenizer))
        return requests

    def _next_seed(self) -> int:
        """For a request that brings none: a function of the engine's seed and the order of
        arrival."""
        return _wrap_to_int64((self.config.seed << 32) + self._num_seeds_drawn * 1_000_003)

    def _to_token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("prompt is text: this engine has no tokenizer; give token ids")
            token_ids = self.tokenizer.encode(prompt)
        elif isinstance(prompt, Sequence):
            token_ids = list(prompt)
        else:
            raise ValueError(f"prompt is a {type(prompt).__name__}: it must be a str or token ids")
        if not token_ids:
            raise ValueError(f"prompt is {prompt!r}: it must hold at least one token")
        self._check_token_ids("prompt", token_ids)
        return [int(t) for t in token_ids]  # NumPy's integers overflow and do not serialise

    def _check_token_ids(self, name: str, token_ids: Sequence[int]) -> None:
        limit = self.model_config.vocab_size
        for t in token_ids:
            if isinstance(t, bool) or not isinstance(t, Integral) or not 0 <= t < limit:
                raise ValueError(
                    f"{name} holds {t!r}: token ids are integers from 0 to {limit - 1}"
                )

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


def _wrap_to_int64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63
