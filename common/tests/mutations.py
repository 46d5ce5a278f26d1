"""Break this line, and this test fails. `BREAK_A_LINE.md` is made from the table below.

    python -m common.tests.mutations               break each line in a copy, run its test
    python -m common.tests.mutations --only 7      one of them
    python -m common.tests.mutations --write       make BREAK_A_LINE.md anew

A test that cannot fail proves nothing. Here are some thirty lines that look harmless, each with
what it would do to a user if it were wrong, and the test that notices. The lines are broken in a
temporary copy of the repository, never in place.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from common.tools.source_patch import ROOT, Patch

PAGE = ROOT / "BREAK_A_LINE.md"
_NOT_COPIED = (".git", ".venv", "build", "dist", "shared", "figures", "*.ipynb", "__pycache__")
_SECONDS = 300  # for one test


@dataclass(frozen=True, slots=True)
class Mutation(Patch):
    test: str  # path::name
    harm: str  # what a user would see


_TABLE: tuple[Mutation, ...] = (
    Mutation(
        "01_batching/fcfs_scheduler.py",
        "while self.waiting and len(self.running) < self.max_num_seqs:",
        "while self.waiting:",
        ""
        "01_batching/test_fcfs_scheduler.py::test_running_never_exceeds_max_num_seqs_however_many_arrive_in_one_step",
        "More requests run than there are seats; on a GPU the batch outgrows its buffers.",
    ),
    Mutation(
        "01_batching/fcfs_scheduler.py",
        "return self.make_plan(admitted | dict.fromkeys(was_running, 1))",
        "return self.make_plan(admitted or dict.fromkeys(was_running, 1))",
        ""
        "01_batching/test_fcfs_scheduler.py::test_running_requests_get_their_token_before_anyone_is_admitted",
        "As long as prompts arrive, everybody who decodes stands still.",
    ),
    Mutation(
        "01_batching/scheduler_books.py",
        "                break  # what was sampled behind it is nobody's",
        "                pass",
        ""
        "01_batching/test_fcfs_scheduler.py::test_several_tokens_of_one_step_are_cut_behind_the_one_that_finishes",
        "Tokens behind the end of the answer reach the user, or the engine stops with an "
        "assertion.",
    ),
    Mutation(
        "01_batching/hf_model_runner.py",
        "sees_past = torch.arange(max(past_lens), device=device) < past",
        "sees_past = torch.arange(max(past_lens), device=device) <= past",
        "01_batching/test_hf_model_runner.py::test_logits_equal_those_of_full_recomputation",
        "Short requests attend to padding: fluent, wrong text, and only in a crowd.",
    ),
    Mutation(
        "02_paged_kv/block_pool.py",
        "            if block.ref_cnt == 0:\n                self._free[block.block_id] = block",
        "            self._free[block.block_id] = block",
        "02_paged_kv/test_block_pool.py::test_a_block_is_free_when_its_last_holder_lets_go",
        "A block that two requests share is handed to a third while one of them still reads it.",
    ),
    Mutation(
        "02_paged_kv/kv_cache_manager.py",
        "        self.pool.free(blocks[::-1])",
        "        self.pool.free(blocks)",
        "02_paged_kv/test_kv_cache_manager.py::test_blocks_are_freed_deepest_first_and_only_once",
        "A prefix cache evicts the heads of prompts before their tails, and keeps what "
        "nobody can use.",
    ),
    Mutation(
        "02_paged_kv/batch_layout.py",
        "positions = np.arange(query_start_loc[-1]) - query_start_loc[owner] + start[owner]",
        "positions = np.arange(query_start_loc[-1]) - query_start_loc[owner] + start[owner] + 1",
        ""
        "02_paged_kv/test_batch_layout.py::test_every_token_stands_at_its_position_and_writes_to_its_slot",
        "Every token is computed one position late: fluent, wrong text (Trap 29).",
    ),
    Mutation(
        "02_paged_kv/block_delta.py",
        "firsts = self.num_blocks[rows] * is_new",
        "firsts = self.num_blocks[rows]",
        "common/runner/test_model_runner.py::test_a_resumed_request_is_taken_over_whole",
        "A request that comes back from a preemption reads the blocks it had before, which are "
        "somebody else's.",
    ),
    Mutation(
        "02_paged_kv/block_delta.py",
        "self._free_rows += range(num_rows - 1, num_before - 1, -1)",
        "self._free_rows += range(num_rows - 1, -1, -1)",
        "common/runner/test_batch_state.py::test_whatever_is_planned_rows_are_what_lists_would_be",
        "Once there are more requests than rows, two of them share one: each continues a mixture "
        "of both.",
    ),
    Mutation(
        "03_prefix_cache/prefix_cache_local.py",
        '[_mix_in(b"", walk.keys)]',
        '[_mix_in(b"", ())]',
        "03_prefix_cache/test_prefix_cache.py::test_extra_keys_separate_everything",
        "Tenants with different salts, and different adapters, are served each other's KV.",
    ),
    Mutation(
        "03_prefix_cache/prefix_cache_local.py",
        "        for cached in reversed(cached_blocks):  # the deepest first: it is evicted "
        "before its parent",
        "        for cached in cached_blocks:",
        ""
        "03_prefix_cache/test_prefix_cache.py::test_a_match_finds_nothing_in_the_middle_of_a_prefix",
        "The first block of a prompt is evicted before the last: what is left can never be found.",
    ),
    Mutation(
        "03_prefix_cache/cached_kv_cache_manager.py",
        "num_usable = (request.num_tokens - 1) // self.block_size * self.block_size",
        "num_usable = request.num_tokens // self.block_size * self.block_size",
        "03_prefix_cache/test_cached_kv_cache_manager.py::test_at_least_the_last_token_is_computed",
        "A prompt that is cached whole computes nothing and so samples nothing: a crash, or "
        "a request that waits for ever (Trap 3).",
    ),
    Mutation(
        "03_prefix_cache/cached_kv_cache_manager.py",
        "            self.cache.touch(computed.blocks)\n",
        "            pass\n",
        ""
        "03_prefix_cache/test_cached_kv_cache_manager.py::test_the_second_request_computes_what_the_first_did_not",
        "A full pool evicts the very blocks that the request has just found (Trap 5).",
    ),
    Mutation(
        "03_prefix_cache/cached_kv_cache_manager.py",
        "num_full = min(num_computed_tokens, request.num_tokens) // self.block_size",
        "num_full = -(-min(num_computed_tokens, request.num_tokens) // self.block_size)",
        ""
        "03_prefix_cache/test_cached_kv_cache_manager.py::test_the_second_request_computes_what_the_first_did_not",
        "Blocks are published before they are full, and the next request reads KV that is "
        "not written.",
    ),
    Mutation(
        "03_prefix_cache/radix_tree.py",
        "        for block in blocks:\n            self.node_of[block.block_id] = upper\n",
        "",
        "03_prefix_cache/test_radix_cache.py::test_a_match_cuts_the_node_that_it_ends_in",
        "After a split the tree looks for a block in the wrong node: references stay on half "
        "of a prompt for ever.",
    ),
    Mutation(
        "04_scheduler/scheduler.py",
        "        if not step.preempted:\n            self._admit(step)",
        "        self._admit(step)",
        ""
        "04_scheduler/test_scheduler.py::test_a_step_that_is_not_the_last_of_a_prompt_samples_nothing",
        "Whoever was just preempted for lack of memory is let in again in the same step, and "
        "thrown out in the next.",
    ),
    Mutation(
        "04_scheduler/scheduler.py",
        "return lowest if lowest is not None and lowest.priority > newcomer.priority else None",
        "return lowest if lowest is not None and lowest.priority >= newcomer.priority else None",
        ""
        "04_scheduler/test_scheduler.py::test_a_strictly_more_urgent_newcomer_takes_a_seat_and_an_equal_does_not",
        "Two requests of equal priority displace each other for ever (Trap 22).",
    ),
    Mutation(
        "04_scheduler/scheduler.py",
        "if not self.kv_memory.can_allocate(request, num_slots, computed, num_kept_free, "
        "displaced):",
        "if False:",
        ""
        "04_scheduler/test_scheduler.py::test_nobody_is_displaced_for_a_newcomer_that_does_not_fit_the_memory",
        "A running request loses its KV to a newcomer that does not fit, and nobody sits in "
        "the seat (Trap 60).",
    ),
    Mutation(
        "04_scheduler/scheduler_base.py",
        "        request.num_computed_tokens = 0\n        request.num_preemptions += 1",
        "        request.num_preemptions += 1",
        ""
        "04_scheduler/test_scheduler.py::test_the_last_admitted_makes_room_and_comes_back_with_its_outputs",
        "A preempted request goes on as if its KV were still there: it continues from "
        "another tenant's memory.",
    ),
    Mutation(
        "04_scheduler/scheduler_base.py",
        "return request.num_preemptions >= self.max_preemptions",
        "return False",
        "04_scheduler/test_scheduler.py::test_nobody_is_preempted_more_often_than_allowed",
        "Under pressure a request can be preempted again and again and never ends (Trap 26).",
    ),
    Mutation(
        "05_spec_decode/rejection_sampler.py",
        "residual = (weights - draft_probs[first_rejected].to(weights.dtype)).clamp(min=0)",
        "residual = weights",
        "05_spec_decode/test_rejection_sampler.py::test_a_step_has_the_law_of_the_target",
        "Sampled text follows another distribution than without speculation: too much of "
        "what the draft model likes.",
    ),
    Mutation(
        "05_spec_decode/rejection_sampler.py",
        "return (self.is_draft & is_accepted).cumprod(dim=-1).sum(dim=-1)",
        "return (self.is_draft & is_accepted).sum(dim=-1)",
        "05_spec_decode/test_rejection_sampler.py::test_a_step_has_the_law_of_the_target",
        "Guesses behind a wrong one are accepted: words from a sentence that was never said.",
    ),
    Mutation(
        "05_spec_decode/speculative_scheduler.py",
        "            request.num_computed_tokens -= num_rejected\n",
        "",
        ""
        "05_spec_decode/test_speculative_scheduler.py::test_drafts_are_planned_trimmed_and_taken_back",
        "KV of rejected guesses counts as computed: the answer is continued from words that "
        "were taken back.",
    ),
    Mutation(
        "06_chunked_prefill/mixed_attention.py",
        "first_tile = max(0, start - history)",
        "first_tile = 0",
        ""
        "06_chunked_prefill/test_mixed_attention.py::test_every_query_length_and_history_around_tile_and_block_borders",
        "Tokens of a prompt see what comes after them: wrong KV for every chunk, and for "
        "whoever finds it in the cache.",
    ),
    Mutation(
        "06_chunked_prefill/mixed_attention.py",
        "self.output.lerp_(other.output, torch.sigmoid(other.lse - self.lse))",
        "self.output.lerp_(other.output, torch.sigmoid(self.lse - other.lse))",
        ""
        "06_chunked_prefill/test_mixed_attention.py::test_every_query_length_and_history_around_tile_and_block_borders",
        "Two parts of the history are weighed the wrong way round; long prompts are misread, "
        "short ones are not.",
    ),
    Mutation(
        "06_chunked_prefill/mixed_batch.py",
        'return np.argsort(is_long, kind="stable"), int(np.count_nonzero(~is_long))',
        "return np.arange(len(is_long)), int(np.count_nonzero(~is_long))",
        ""
        "06_chunked_prefill/test_mixed_batch.py::test_every_token_stands_once_at_its_place_and_the_short_ones_in_front",
        "The kernel for short queries is run on prompts, and what it leaves out stays zero.",
    ),
    Mutation(
        "06_chunked_prefill/chunk_policy.py",
        "return min(num_behind, budget, self.long_prefill_token_threshold or budget)",
        "return min(num_behind, self.long_prefill_token_threshold or budget)",
        ""
        "06_chunked_prefill/test_chunk_policy.py::test_nobody_gets_more_than_it_needs_or_than_there_is_and_somebody_always_gets_one",
        "A step computes more than its budget: the pause that chunks were to prevent is back.",
    ),
    Mutation(
        "common/runner/model_runner.py",
        "num_logit_rows = np.where(is_last, 1 + num_drafts, 0)",
        "num_logit_rows = 1 + num_drafts",
        ""
        "common/runner/test_model_runner.py::test_a_prompt_in_pieces_gives_logits_with_its_last_piece_only",
        "The middle of a prompt gets a token sampled for it, and every later row its "
        "neighbour's (Trap 31).",
    ),
    Mutation(
        "common/runner/batch_state.py",
        "self.write_tokens(rows, self.num_tokens[rows], list(drafts.values()))",
        "self.write_tokens(rows, self.num_tokens[rows] - 1, list(drafts.values()))",
        "common/runner/test_batch_state.py::test_whatever_is_planned_rows_are_what_lists_would_be",
        "The first guess overwrites the last word that was said, and the others are judged behind "
        "the wrong one.",
    ),
    Mutation(
        "common/sampling/sampling_columns.py",
        "is_seed_drawn, num_writes = isinstance(p, DrawnSeedParams), self.num_writes[row] + 1",
        "is_seed_drawn, num_writes = isinstance(p, DrawnSeedParams), self.num_writes[row]",
        "common/sampling/test_token_counts.py::test_kept_counts_are_those_of_a_recount",
        "A request is penalised for the words of the one that had its row before.",
    ),
    Mutation(
        "common/sampling/sampling_columns.py",
        "        fresh.forbidden = self.forbidden\n",
        "",
        ""
        "common/sampling/test_sampling_columns.py::test_rows_are_what_was_last_written_to_them_through_reuse_and_growth",
        "One request more than there are rows, while another has `min_tokens`: the step raises, "
        "and all that run are aborted.",
    ),
    Mutation(
        "common/sampling/speculative_sampler.py",
        "self.sampling, self.most_drafts = batch.select(rows), width - 1",
        "self.sampling, self.most_drafts = batch.select(first[run]), width - 1",
        ""
        "common/tests/test_speculation_engine.py::test_with_a_seed_every_constraint_gives_the_tokens_of_plain_decoding",
        "A seeded request says something else as soon as speculation is switched on.",
    ),
    Mutation(
        "common/tokenizer.py",
        "self._utf8 = "
        'codecs.getincrementaldecoder("utf-8")(errors=tokenizer.decode_errors)\n        '
        "self._pieces",
        "self._utf8 = "
        'codecs.getincrementaldecoder("latin-1")(errors=tokenizer.decode_errors)\n        '
        "self._pieces",
        "common/test_tokenizer.py::test_stream_of_any_text_is_the_full_decode",
        "Characters that two tokens share, most of Chinese and every emoji, arrive as "
        "question marks (Trap 47).",
    ),
    Mutation(
        "common/tokenizer.py",
        "num_held = 0 if self._is_finished else self._num_held(unsent)",
        "num_held = 0",
        ""
        "common/test_tokenizer.py::test_stop_strings_are_found_at_their_earliest_end_and_never_streamed",
        "A stream shows the beginning of a stop string, and cannot take it back.",
    ),
    Mutation(
        "03_prefix_cache/beyond/weights_digest.py",
        "tensor.detach().reshape(-1).view(torch.uint8).split(_DIGEST_BYTES)",
        "tensor.detach().reshape(-1).view(torch.uint8)[:4096].split(_DIGEST_BYTES)",
        "03_prefix_cache/beyond/test_weights_digest.py::test_every_element_of_every_weight_is_in_the_digest",
        "Two models that differ in one row exchange KV over a shared disk, silently (Trap 59).",
    ),
    Mutation(
        "01_batching/beyond/overlapped_books.py",
        "                cached.pending_req_ids.append(request_id)",
        "                pass",
        ""
        "01_batching/beyond/test_overlapped_books.py::test_a_pending_token_is_counted_planned_on_and_sent_when_it_is_known",
        "With overlap the runner keeps -1 for a token that it sampled itself: no model has it.",
    ),
    Mutation(
        "04_scheduler/scheduler_base.py",
        "        return min(num_known, request.max_num_tokens - 1) - request.num_computed_tokens",
        "        return num_known - request.num_computed_tokens",
        ""
        "04_scheduler/beyond/test_overlapped_scheduling.py::test_nothing_is_planned_behind_the_last_token_allowed",
        "With overlap every request computes one token too many, and where memory is full, takes a "
        "block for it.",
    ),
    Mutation(
        "03_prefix_cache/beyond/loading_kv_cache_manager.py",
        "            self.wait_for_steps()",
        "            pass",
        "common/tests/test_overlap_engine.py::test_a_load_waits_for_the_steps_under_way",
        "With overlap a step of somebody who has ended writes into KV that was just loaded.",
    ),
)
MUTATIONS = tuple(sorted(_TABLE, key=lambda mutation: mutation.file.partition("/")[0]))


# -- the page

_TITLES = {
    "01_batching": "1. Batching",
    "02_paged_kv": "2. Paged KV",
    "03_prefix_cache": "3. Prefix cache",
    "04_scheduler": "4. Scheduler",
    "05_spec_decode": "5. Speculative decoding",
    "06_chunked_prefill": "6. Chunked prefill",
    "common": "The engine around them",
}
_HEAD = """# Break a line

{count} lines of this repository, each broken on purpose: what a user would see, and the test that
notices. Break one yourself, guess what happens, then run its test. Or let
`python -m common.tests.mutations --only N` do it in a copy. (This page is made from the table in
[`common/tests/mutations.py`](common/tests/mutations.py).)
"""


def render() -> str:
    """The text of `BREAK_A_LINE.md`."""
    parts = [_HEAD.format(count=len(MUTATIONS))]
    numbered = enumerate(MUTATIONS, 1)
    for chapter, group in groupby(numbered, key=lambda pair: pair[1].file.partition("/")[0]):
        parts.append(f"## {_TITLES[chapter]}\n")
        for number, mutation in group:
            parts.append(_entry(number, mutation))
    return "\n".join(parts)


def _entry(number: int, mutation: Mutation) -> str:
    test_file, _, test = mutation.test.partition("::")
    old, new = (
        [f"{sign} {line.strip()}" for line in code.splitlines() if line.strip()]
        for sign, code in (("-", mutation.old), ("+", mutation.new))
    )
    lines = "\n".join(old + new)
    return (
        f"**{number}.** [`{mutation.file}`]({mutation.file}). {mutation.harm}\n\n"
        f"```diff\n{lines}\n```\n\n"
        f"Caught by `{test}` in [`{Path(test_file).name}`]({test_file}).\n"
    )


# -- breaking


@contextmanager
def copy_of_the_repository() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*_NOT_COPIED))
        yield copy


def passes(copy: Path, tests: Sequence[str]) -> bool:
    """Raises `RuntimeError` if pytest could not run them: a test that cannot be imported says
    nothing."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=line"]
    done = subprocess.run(
        [*command, *tests],
        cwd=copy,
        env=environment,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
    )
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{tests}: pytest ended with {done.returncode}\n{done.stdout[-2000:]}")
    return done.returncode == 0


def is_caught(copy: Path, mutation: Mutation) -> bool:
    """Break the line in the copy, run the test, mend the line."""
    path = copy / mutation.file
    try:
        path.write_text(mutation.apply(), encoding="utf-8")
        return not passes(copy, [mutation.test])
    finally:
        path.write_text(mutation.text(), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Break lines and see their tests fail.")
    parser.add_argument("--only", type=int, metavar="N", help="this one alone, from 1")
    parser.add_argument("--write", action="store_true", help="make BREAK_A_LINE.md and stop")
    options = parser.parse_args(arguments)
    if options.write:
        PAGE.write_text(render(), encoding="utf-8")
        return 0
    if options.only is not None and not 1 <= options.only <= len(MUTATIONS):
        parser.error(f"--only is {options.only}: it must be in [1, {len(MUTATIONS)}]")
    numbers = range(1, len(MUTATIONS) + 1) if options.only is None else [options.only]
    survivors = 0
    with copy_of_the_repository() as copy:
        for number in numbers:
            mutation = MUTATIONS[number - 1]
            caught = is_caught(copy, mutation)
            survivors += not caught
            print(f"{number:2} {'caught' if caught else 'SURVIVED'}  {mutation.file}", flush=True)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
