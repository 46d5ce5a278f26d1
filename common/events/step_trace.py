"""Describe a step in seven lines, or in one. Everything comes from the `StepRecord`; nothing is
recomputed.

arrive     numbers of running and waiting requests when the step began
schedule   tokens to compute, by request
blocks     KV blocks that are held, and the share of their slots that is written
prepare    positions of each request's tokens in its sequence
forward    one pass through the model
sample     the sampled tokens
update     requests that finished, with the reason

With speculation (chapter 5), an eighth line: proposing draft tokens for the next step.

`engine.on_step = lambda record: print(batch_line(record))` logs each batch in one line, as SGLang
does (`log_prefill_stats`).

See common/events/README.md#the-format-version-2"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from kv_cache_manager import KVCacheManager
from step_record import StepRecord

_MAX_SHOWN = 6


def describe_step(
    record: StepRecord, memory: KVCacheManager, decode: Callable[[list[int]], str] | None = None
) -> str:
    """Return the lines of one step. `decode` turns token ids into text; None: ids are shown."""
    scheduled = record.num_scheduled_tokens
    num_tokens = sum(scheduled.values())
    before = len(scheduled) - len(record.admitted)
    waited = record.num_waiting + len(record.admitted)
    slots = record.kv_blocks_in_use * memory.block_size
    num_written_slots = memory.num_written_slots(record.start_positions.values(), num_tokens)
    written = f", {num_written_slots / slots:.0%} of their slots written" if slots else ""

    def sampled(request_id: str) -> str:
        ids = record.new_token_ids.get(request_id, [])
        if not ids:
            return f"{request_id} nothing: its prompt is unfinished"
        return f"{request_id} {decode(ids)!r}" if decode else f"{request_id} {ids}"

    def stretch(request_id: str) -> str:
        first = record.start_positions[request_id]
        last = first + scheduled[request_id] - 1
        return f"{request_id} [{first}]" if first == last else f"{request_id} [{first}..{last}]"

    admitted = f"  admitted: {_some(record.admitted)}" if record.admitted else ""
    preempted = f"  preempted: {_some(record.preempted)}" if record.preempted else ""
    drafts = _some([f"{r} {right} of {n}" for r, (n, right) in record.drafts.items()])
    verified = f"  drafts accepted: {drafts}" if drafts else ""
    finished = _some([f"{name} ({reason})" for name, reason in record.finished.items()])
    lines = [
        f"step {record.step}  ({num_tokens} tokens, {record.step_ms:.2f} ms)",
        f"  1 arrive    {before} running, {waited} waiting",
        f"  2 schedule  {_some([f'{r} {n}' for r, n in scheduled.items()])}"
        f"{admitted}{preempted}  {record.schedule_ms:.2f} ms",
        f"  3 blocks    {record.kv_blocks_in_use} held{written}",
        f"  4 prepare   positions {_some([stretch(r) for r in scheduled])}"
        f"  {record.prepare_ms:.2f} ms",
        f"  5 forward   {num_tokens} tokens in one pass  {record.forward_ms:.2f} ms",
        f"  6 sample    {_some([sampled(r) for r in scheduled])}{verified}"
        f"  {record.sample_ms:.2f} ms",
        f"  7 update    {'finished: ' + finished if finished else 'none finished'}"
        f"  {record.update_ms:.2f} ms",
    ]
    if record.propose_ms:
        lines.append(f"    propose   draft tokens for the next step  {record.propose_ms:.2f} ms")
    return "\n".join(lines)


def batch_line(record: StepRecord) -> str:
    """Return one line for a step. Tokens that were found in the cache count as `#cached-token`, not
    also as `#new-token`; the hit rate is their share of both. A prompt's last chunk of one token
    looks like a decode."""
    drafts = record.drafts
    scheduled = record.num_scheduled_tokens
    num_new_tokens = num_decodes = 0
    for name, num_tokens in scheduled.items():
        if name not in record.admitted and num_tokens == 1 + drafts.get(name, (0, 0))[0]:
            num_decodes += 1
        else:
            num_new_tokens += num_tokens
    others = f"#running-req: {num_decodes}, #queue-req: {record.num_waiting}"
    if num_new_tokens == 0:
        return f"Decode batch. {others}"
    num_cached = sum(record.start_positions[name] for name in record.admitted)
    return (
        f"Prefill batch. #new-seq: {len(record.admitted)}, #new-token: {num_new_tokens}, "
        f"#cached-token: {num_cached}, "
        f"cache-hit-rate: {num_cached / (num_cached + num_new_tokens):.2f}, {others}"
    )


def _some(items: list[str]) -> str:
    shown = ", ".join(islice(items, _MAX_SHOWN))
    left = len(items) - _MAX_SHOWN
    return f"{shown} and {left} more" if left > 0 else shown
