"""Evening 6: prompts in pieces, a batch of both kinds, and attention in parts."""

from __future__ import annotations

from common.workshop.museum.props import request
from common.workshop.tasks.task import Task


def sizes() -> str:
    from chunk_policy import ChunkedPrefill

    one = request("r", 500)
    lines = []
    for threshold in (None, 100):
        policy = ChunkedPrefill(threshold)
        for behind, budget in ((500, 2048), (500, 300), (80, 2048), (500, 60)):
            given = policy.num_tokens_now(one, behind, budget, most=2048)
            lines.append(f"threshold {threshold}, {behind} behind, {budget} left: {given}")
    return "\n".join(lines)


def starts() -> str:
    from chunk_policy import ChunkedPrefill

    policy = ChunkedPrefill(long_prefill_token_threshold=100, max_long_partial_prefills=2)
    running = request("running", 500)
    running.num_computed_tokens = 100
    policy.begin_step([running], lambda one: one.num_tokens - one.num_computed_tokens)
    lines = ["long is more than 100; 2 long ones at once; one is under way"]
    for behind in (100, 101, 20, 300, 400):
        lines.append(f"may a prompt of {behind} start? {policy.may_start(request('r', 9), behind)}")
    free = ChunkedPrefill(100)
    lines.append(f"without a limit, 500? {free.may_start(request('r', 9), 500)}")
    return "\n".join(lines)


def masks() -> str:
    import torch

    from attention_plan import DecodeGroup

    keys = torch.zeros(4, 4, 1, 2)
    tables = torch.tensor([[1, 2], [3, 0]])
    group = DecodeGroup([0, 1], [0, 3, 4], [6, 4], tables, 1, keys)
    lines = [f"rows of the query: {group.tokens.tolist()}"]
    if group.mask is None:
        return "\n".join([*lines, "no mask"])
    for name, mask in zip(("6 keys, 3 queries", "4 keys, 1 query"), group.mask[:, 0]):
        lines.append(name + ":")
        lines += ["  " + " ".join("x" if seen else "." for seen in row) for row in mask == 0]
    return "\n".join(lines)


def merged() -> str:
    import torch

    from mixed_attention import Partial

    def part(scores: torch.Tensor, values: torch.Tensor) -> Partial:
        lse = scores.logsumexp(-1, keepdim=True)
        return Partial((scores - lse).exp() @ values, lse)

    values = torch.tensor([[1.0], [2.0], [5.0]]).double()
    lines = []
    for shown in ([0.0, 0.0, 0.0], [1.0, 2.0, 4.0], [800.0, 801.0, 799.0]):
        scores = torch.tensor([shown]).double()
        both = part(scores[:, :2], values[:2])
        both.merge(part(scores[:, 2:], values[2:]))
        whole = part(scores, values)
        lines.append(
            f"scores {shown}: {both.output.item():.4f} (at once {whole.output.item():.4f}), "
            f"log-sum-exp {both.lse.item():.4f}"
        )
    return "\n".join(lines)


TASKS = (
    Task(
        number="6.1",
        title="How much of a prompt goes into a step?",
        minutes=8,
        difficulty=1,
        module="chunk_policy",
        place="ChunkedPrefill.num_tokens_now",
        write="A prompt of 2,000 tokens would make one very long step. Cut it: how many of its "
        "tokens are computed now?\n\n"
        "The request is `num_behind` tokens behind, and the step has `budget` tokens left. "
        "`self.long_prefill_token_threshold` is the most that one prompt gets of a step; None "
        "means that there is no such limit. (`most` is the budget of an empty step. You do not "
        "need it.)\n\n"
        "Keep this: nobody gets more than it is behind, nor more than what is left; and where "
        "one token is left, a request gets at least one, so that every prompt ends.",
        hints=(
            "It is the smallest of three numbers, of which one may be None.",
            "Where there is no threshold, the budget can stand in its place.",
            "min(num_behind, budget, self.long_prefill_token_threshold or budget)",
        ),
        test_module="test_chunk_policy",
        tests=(
            "test_nobody_gets_more_than_it_needs_or_than_there_is_and_somebody_always_gets_one",
            "test_a_prompt_comes_in_pieces_of_the_threshold_and_yields_one_token_at_its_end",
            "test_a_prompt_longer_than_a_step_takes_what_the_step_has",
        ),
        probe=sizes,
        engine={"chunked_prefill": 8},
    ),
    Task(
        number="6.2",
        title="So many long prompts, and no more",
        minutes=12,
        difficulty=2,
        module="chunk_policy",
        place="ChunkedPrefill.may_start",
        write="If ten long prompts are under way at once, each advances a little in every step "
        "and none is done soon. So there may be a limit, `self.max_long_partial_prefills`; None "
        "means no limit.\n\n"
        "A waiting request with `num_behind` tokens to compute asks whether it may start in "
        "this step. `self._is_long(num_behind)` says whether it is long. `self._num_long` "
        "counts the long ones that are under way.\n\n"
        "Keep this: a short prompt always may. A long one may while there are fewer than the "
        "limit, and then it is one of them: what is granted counts as used.",
        hints=(
            "Two reasons to say yes at once: there is no limit, or the prompt is short.",
            "Several requests ask in one step. The second must see that the first has got the "
            "last place.",
            "if no limit or not long: return True; if self._num_long >= the limit: return "
            "False; self._num_long += 1; return True",
        ),
        test_module="test_chunk_policy",
        tests=(
            "test_so_many_long_prompts_are_under_way_and_short_ones_pass",
            "test_a_long_prompt_that_is_held_back_does_not_wait_for_ever",
            "test_what_a_cached_prefix_leaves_decides_what_is_long",
        ),
        probe=starts,
        engine={"chunked_prefill": 8, "max_long_partial_prefills": 1},
    ),
    Task(
        number="6.3",
        title="The mask of a mixed batch",
        minutes=30,
        difficulty=3,
        module="attention_plan",
        place="DecodeGroup.__init__",
        names=("tokens", "positions", "hidden"),
        write="In a mixed batch some requests have one query token and others a few. They are "
        "attended together, so rows are padded to `query_len` tokens, and a mask says which "
        "keys each of them sees. A request's query tokens are its *last* ones:\n\n"
        "    6 keys, 3 queries        4 keys, 1 query, padded to 3 rows\n"
        "    x x x x . .              x x x x . .\n"
        "    x x x x x .              x x x x . .\n"
        "    x x x x x x              x x x x . .        the last two keys are not its own\n\n"
        "`first`, `stop` and `seq_len` are tensors `[n, 1]`: request i has rows first[i] to "
        "stop[i] - 1 of the query, and seq_len[i] keys. `slots` is 0, 1, 2, ... Make three "
        "tensors, without a loop:\n\n"
        "    tokens      [n, query_len] int64   rows of the query, aligned to the last one; a\n"
        "                                       request with fewer repeats its first\n"
        "    positions   [n, query_len] int64   where those tokens stand in their own text\n"
        "    hidden      [n, query_len, num_keys] bool   keys behind them; `self.num_keys`\n\n"
        "Keep this: a token sees itself and all before it, and nothing behind it.",
        hints=(
            "The last row of the query, stop - 1, stands at position seq_len - 1. So a row and "
            "its position differ by the same number in a whole request.",
            "torch.arange(query_len, 0, -1) is query_len, ..., 2, 1: take it off `stop`. Where "
            "that falls below `first`, `first` it is.",
            "tokens = (stop - torch.arange(query_len, 0, -1)).maximum(first); positions = tokens "
            "- stop + seq_len; hidden = slots[: self.num_keys] > positions[:, :, None]",
        ),
        test_module="test_mixed_attention",
        tests=(
            "test_many_short_queries_are_attended_together",
            "test_mixed_metadata_is_attended_without_asking_the_device",
            "test_grouped_query_heads",
        ),
        probe=masks,
        engine={"speculative": {"method": "ngram"}},
    ),
    Task(
        number="6.4",
        title="Attention in parts: online softmax",
        minutes=20,
        difficulty=3,
        module="mixed_attention",
        place="Partial.merge",
        write="A long history is read piece by piece. For each piece there is a partial result: "
        "attention to its own keys alone (`output`), and the log of the sum of exp(score) over "
        "them (`lse`). Merge two of them into what attention to all their keys would give.\n\n"
        "The softmax over all keys has one sum, exp(lse of one) + exp(lse of the other). So "
        "each side's output counts with its share of that sum. Change `self.output` and "
        "`self.lse` in place; `other` belongs to other keys of the same queries.\n\n"
        "Keep this: the result does not depend on how the keys were cut. Scores may be in the "
        "hundreds, where exp() is infinite: work with differences of the logs.",
        hints=(
            "The share of `other` is exp(b) / (exp(a) + exp(b)). Divide both by exp(b): only "
            "the difference a - b is left.",
            "1 / (1 + exp(a - b)) is torch.sigmoid(b - a). The new log-sum-exp is "
            "torch.logaddexp(a, b).",
            "self.output.lerp_(other.output, torch.sigmoid(other.lse - self.lse)); "
            "torch.logaddexp(self.lse, other.lse, out=self.lse)",
        ),
        test_module="test_mixed_attention",
        tests=(
            "test_decodes_longer_than_a_group_may_be_are_split_over_their_keys",
            "test_scores_of_any_size_neither_overflow_nor_vanish",
            "test_partial_results_are_merged_in_float32",
            "test_every_query_length_and_history_around_tile_and_block_borders",
        ),
        probe=merged,
        # Without compiled kernels and without a bound on keys, only a chunk with history merges.
        engine={"chunked_prefill": 8},
    ),
)
