"""The prefill-first scheduler, as in SGLang: a batch is either a prefill or a decode, and prefills
go first.

Chapter 1 and `scheduler.py` schedule all running requests in every step. Here a step is one of

    EXTEND    prompts from the queue, as many as fit; decoding requests wait
    DECODE    one token for each running request
    MIXED     prompts, and one token for each running request (`mixing=True`)

and `get_next_batch_to_run` chooses: a prefill batch if one can be made, else a decode batch. A
request whose prompt has been computed decodes from the next step on.

    waiting --PrefillAdder--> last_batch --merge_batch--> running_batch --> (gone)
       ^                        |    ^ chunked_req: one prompt, between two of its chunks
       +------ retraction ------+-----------------------------+

New requests get their first token soon and batches are large. Decoding requests pay for that,
because they stand still while prompts keep arriving. So after `max_consecutive_prefills` prefill
batches in a row that made requests wait, one decode batch runs. A decoding request gets a token at
least every `max_consecutive_prefills + 1` steps, unless it is retracted.

Memory is neither reserved nor simply filled: the adder sets aside a share, `new_token_ratio`, of
the tokens that running requests may still generate. The share shrinks with every decode batch, so
that more requests are admitted. If that goes wrong and the next tokens find no pages,
`retract_decode` frees the KV of the request with the fewest outputs (among equals, the longest
input), because that loses the least work. Then the share is raised to what the remaining requests
have shown to need.

A request that runs alone never fails for lack of memory: `add_request` has lowered its `max_tokens`
to what the whole pool holds, and it ends there with the reason "length". Only KV that is being
loaded for a waiting request can block it: then it skips a step, and loads are evicted when they
have arrived. For why no request is retracted forever, see pinned requests in
`preemptive_scheduler.py`.

With `policy="fcfs"`, `mixing` off and `max_consecutive_prefills=None` this is nano-vllm's rule:
prefill whenever a waiting request fits, else decode. (nano-vllm sets nothing aside, and preempts
the last admitted request.) The names are SGLang's. Priorities order the queue, but never preempt a
running request.

See 04_scheduler/beyond/PREFILL_FIRST.md#3-which-batch"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING

from preemptive_scheduler import PreemptiveScheduler, SchedulerOptions
from prefill_adder import AddReqResult, NewTokenRatio, PrefillAdder
from request import Request
from schedule_batch import ForwardMode, ScheduleBatch
from scheduler_interface import SchedulerOutput
from step_plan import Admission, StepPlan
from unchunked import ChunkToBudget

if TYPE_CHECKING:
    from typing import Unpack

__all__ = ["ForwardMode", "PrefillFirstScheduler", "ScheduleBatch"]


class PrefillFirstScheduler(PreemptiveScheduler):
    """The scheduler that prefers prompts. The other parameters are those of `PreemptiveScheduler`.

    `chunked_prefill_size`: prompts are split into chunks of at most this many tokens; None: they
    are computed whole, and rejected if they are longer than a step. `chunk_policy` can give a
    prompt fewer tokens, never more. `mixing` puts decodes into prefill batches; a whole prompt then
    waits until it fits next to the decodes. The share set aside falls from `init_new_token_ratio`
    to `min_new_token_ratio` in `new_token_ratio_decay_steps` decode batches.
    """

    def __init__(
        self,
        *,
        mixing: bool = False,
        chunked_prefill_size: int | None = None,
        init_new_token_ratio: float = 0.7,
        min_new_token_ratio: float = 0.1,
        new_token_ratio_decay_steps: int = 600,
        max_consecutive_prefills: int | None = 8,
        **options: Unpack[SchedulerOptions],
    ) -> None:
        if chunked_prefill_size is not None and options.get("chunk_policy") is None:
            options["chunk_policy"] = ChunkToBudget()
        super().__init__(**options)
        # Each running request gets a token in a decode batch, so the token budget limits them too.
        self.max_num_seqs = min(self.max_num_seqs, self.max_num_batched_tokens)
        self.mixing = mixing
        self.chunked_prefill_size = chunked_prefill_size
        self.max_consecutive_prefills = max_consecutive_prefills
        self._new_token_ratio = NewTokenRatio(
            init_new_token_ratio, min_new_token_ratio, new_token_ratio_decay_steps
        )
        self._clear_batches()
        self._num_prefills_in_a_row = 0  # consecutive prefill batches that made requests wait

    def _clear_batches(self) -> None:
        self.running_batch = ScheduleBatch(self.kv_memory)  # decoding requests
        self.last_batch = ScheduleBatch(self.kv_memory)
        self.chunked_req: Request | None = None

    def clear(self) -> None:
        self._clear_batches()
        super().clear()

    @property
    def new_token_ratio(self) -> float:
        """The share of their possible outputs that decoding requests are expected to generate."""
        return self._new_token_ratio.value

    def schedule(self) -> SchedulerOutput:
        """Plan a step: a prefill batch, a decode batch, or both in one."""
        step = self.begin_step()
        self.last_batch = self.get_next_batch_to_run(step)
        return self.finish_step(step)

    def running_with_chunks(self) -> Collection[Request]:
        if self.mixing:
            return self.running.values()
        return [] if self.chunked_req is None else [self.chunked_req]

    # -- which batch

    def get_next_batch_to_run(self, step: StepPlan) -> ScheduleBatch:
        """Choose the batch of this step, and schedule it in `step`. If requests were retracted for
        it, none is admitted, because that would use the memory that was just missing."""
        self._merge_last_batch()
        have_waited = self._num_prefills_in_a_row == self.max_consecutive_prefills
        is_turn_of_decodes = have_waited and bool(self.running_batch.reqs)
        if is_turn_of_decodes and not self.mixing:
            step.stop = ("turn", "")
        if self.mixing or step.preempted or is_turn_of_decodes:
            decodes = self.update_running_batch(step)  # decodes come first in a mixed batch
            if not self.mixing or step.preempted:
                return decodes
        new_batch = self.get_new_batch_prefill(step)
        if new_batch is None:
            return decodes if self.mixing else self.update_running_batch(step)
        if self.mixing:
            new_batch.mix_with_running(decodes)
        elif self.running_batch.reqs:
            self._num_prefills_in_a_row += 1
        return new_batch

    def _merge_last_batch(self) -> None:
        """Move requests whose prompt is computed to the decode batch."""
        if self.chunked_req is not None and self.chunked_req.is_finished:
            self.chunked_req = None  # aborted
        self.running_batch.filter_batch()
        if self.last_batch.forward_mode is not ForwardMode.DECODE:
            self.last_batch.filter_batch(self.chunked_req)
            self.running_batch.merge_batch(self.last_batch)

    # -- prefill

    def get_new_batch_prefill(self, step: StepPlan) -> ScheduleBatch | None:
        """Schedule as many prompts in `step` as fit: first the chunked one, then waiting ones.
        Returns None if none fits."""
        if self.chunked_req is None and not self.waiting:
            return None
        adder = self._make_adder(step)
        if self.chunked_req is not None:
            self.chunked_req = adder.add_chunked_req(self.chunked_req)
            if not adder.can_run_list:
                step.stop = ("blocks" if adder.rem_input_tokens > 0 else "budget", "")
                return None  # it found no memory, and no other request may take what it waits for
        self.admit(step, partial(self._try_to_admit, adder))
        if not adder.can_run_list:
            return None
        if adder.new_chunked_req is not None:
            assert self.chunked_req is None, "two prompts are chunked at the same time"
            self.chunked_req = adder.new_chunked_req
        for request in adder.can_run_list:
            step.add(request, adder.num_tokens[request.request_id])
        return ScheduleBatch(self.kv_memory, adder.can_run_list, ForwardMode.EXTEND)

    def _make_adder(self, step: StepPlan) -> PrefillAdder:
        decodes = self.running_batch
        chunk = step.budget
        if (size := self.chunked_prefill_size) is not None:
            # In a mixed batch, decodes reduce the chunk too, but one page is left however many they
            # are: otherwise a prompt would wait for all of them.
            num_planned = self.max_num_batched_tokens - step.budget
            chunk = max(size - num_planned, min(size, self.block_size))
        # In a mixed batch, decodes already have their next pages.
        num_next_pages = 0 if self.mixing else decodes.new_page_count_next_decode()
        return PrefillAdder(
            kv_memory=self.kv_memory,
            allocate=self.start_running,
            running=decodes.reqs,
            new_token_ratio=self.new_token_ratio,
            rem_input_tokens=step.budget,
            rem_chunk_tokens=chunk,
            max_input_tokens=self.max_num_batched_tokens,
            num_next_decode_tokens=num_next_pages * self.block_size,
            chunk_policy=self.chunk_policy,
        )

    def _try_to_admit(self, adder: PrefillAdder, request: Request, step: StepPlan) -> Admission:
        if len(self.running) >= self.max_num_seqs:
            return Admission.BATCH_FULL
        computed = self.find_prefix(request, step)
        if isinstance(computed, Admission):
            return computed
        result = adder.add_one_req(request, self.chunked_req is not None, computed)
        if request.request_id in adder.num_tokens:
            return Admission.ADMITTED  # the result is about the next request
        return Admission.BLOCKS if result is AddReqResult.NO_TOKEN else Admission.BUDGET

    # -- decode

    def update_running_batch(self, step: StepPlan) -> ScheduleBatch:
        """Schedule one token for each decoding request in `step`, retracting some if memory is
        short."""
        batch = self.running_batch
        self._num_prefills_in_a_row = 0
        if not batch.reqs:
            self._new_token_ratio.reset()
            return batch
        if batch.check_decode_mem():
            self._new_token_ratio.decay()
        else:
            step.preempted += batch.retract_decode(self.preempt, self.is_pinned, self.chunked_req)
            self._new_token_ratio.raise_for(batch.reqs)
            if not batch.check_decode_mem():
                return ScheduleBatch(self.kv_memory)  # it is alone, and a load blocks it
        num_spare = step.budget - len(batch.reqs)
        if self.mixing and (self.waiting or self.chunked_req is not None):
            num_spare -= self.block_size
        for request in batch.reqs:
            num_tokens = self.num_uncomputed_tokens(request)
            if num_tokens == 1 and self.hooks["num_optional_tokens"]:
                num_optional = max(0, min(self.num_optional_tokens(request), num_spare))
                num_optional = self.allocate_optional(request, num_optional)
                num_spare -= num_optional
                num_tokens += num_optional
            if num_tokens:
                step.add(request, num_tokens)
        return batch

    def preempt(self, request: Request) -> None:
        if request is self.chunked_req:
            self.chunked_req = None
        super().preempt(request)

    def check_invariants(self) -> None:
        super().check_invariants()
        holders = [] if self.chunked_req is None else [self.chunked_req]
        holders += self.running_batch.reqs
        if self.last_batch is not self.running_batch:
            holders += (r for r in self.last_batch.reqs if r is not self.chunked_req)
        held = [r.request_id for r in holders if not r.is_finished]
        assert sorted(held) == sorted(self.running), "a request is in two batches or in none"
