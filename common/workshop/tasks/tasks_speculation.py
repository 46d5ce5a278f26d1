"""Evening 5: guesses, which row judges them, and what comes in the place of a wrong one."""

from __future__ import annotations

from typing import Any

from common.workshop.tasks.task import Task


def look_ups() -> str:
    from input_batch import RunnerRequest
    from proposers import FollowedRequest, NgramProposer
    from request import SamplingParams

    proposer = NgramProposer(num_spec_tokens=2, max_ngram=4, min_ngram=2)
    lines = []
    for number, tokens in enumerate(
        ([2, 3, 5, 1, 2, 3, 4, 9, 1, 2, 3], [7, 8, 5, 1, 7, 8], [5, 6, 7])
    ):
        known = RunnerRequest(str(number), SamplingParams(), tokens, [])
        drafts = proposer.propose([FollowedRequest(known, 0, len(tokens) - 1)], [2])
        lines.append(f"behind {tokens}: {drafts.get(str(number), 'nothing')}")
    return "\n".join(lines)


def judged_rows() -> str:
    from spec_decode import SimpleLM, verify_and_sample

    model = SimpleLM(50, seed=3)
    said: list[int] = []
    for _ in range(4):
        said.append(int(model.get_logits([1, 2, 3, *said])[-1].argmax()))
    lines = [f"behind 1, 2, 3 the target says {said}"]
    for drafts in (said[:3], [said[0], 49, said[2]], []):
        tokens, num_accepted = verify_and_sample(model, [1, 2, 3], drafts, temperature=0)
        lines.append(f"guesses {drafts}: {num_accepted} accepted, tokens {tokens}")
    return "\n".join(lines)


def _sampled(p: list[list[float]], drafts: list[int], q: Any, accept: float, u: float) -> str:
    import torch

    from rejection_sampler import rejection_sample

    verified = rejection_sample(
        torch.tensor(p, dtype=torch.float64),
        torch.tensor(drafts),
        None if q is None else torch.tensor(q, dtype=torch.float64),
        torch.tensor([0, len(drafts) + 1]),
        len(drafts),
        torch.full((len(drafts),), accept, dtype=torch.float64),
        torch.full((len(drafts) + 1,), u, dtype=torch.float64),
    )
    num_sampled = int(verified.num_sampled[0])
    return f"{num_sampled - 1} accepted, tokens {verified.token_ids[0, :num_sampled].tolist()}"


def accepted() -> str:
    p = [[0.6, 0.4, 0.0], [0.0, 0.5, 0.5], [0.2, 0.2, 0.6]]
    q = [[0.8, 0.1, 0.1], [0.3, 0.3, 0.4]]
    lines = ["p (of the target) " + str(p), "q (of the draft) " + str(q)]
    for drafts, u in (([0, 1], 0.7), ([0, 1], 0.8), ([1, 1], 0.99), ([2, 1], 0.0)):
        lines.append(f"drafts {drafts}, random number {u}: {_sampled(p, drafts, q, u, 0.9)}")
    return "\n".join(lines)


def residuals() -> str:
    p, q = [[0.5, 0.3, 0.2], [0.0, 0.0, 1.0]], [[0.8, 0.1, 0.1]]
    lines = ["p [0.5, 0.3, 0.2], q [0.8, 0.1, 0.1], draft 0 is rejected"]
    lines += [f"random number {u}: {_sampled(p, [0], q, 0.99, u)}" for u in (0.0, 0.6, 0.82)]
    lines.append("a draft that was certain (no q)")
    lines += [f"random number {u}: {_sampled(p, [0], None, 0.99, u)}" for u in (0.0, 0.5, 0.7)]
    return "\n".join(lines)


TASKS = (
    Task(
        number="5.1",
        title="Guess by looking it up",
        minutes=10,
        difficulty=1,
        module="proposers",
        place="NgramProposer._find",
        write="Texts repeat themselves. If the last few tokens stood somewhere before, what came "
        "behind them there is a good guess for what comes now.\n\n"
        "`history.first[n]` is a dictionary: from n tokens (a tuple) to the place behind the "
        "first time that they stood in the text. `tokens` ends with the newest token. Look up "
        "the last n tokens, for the largest n first: from `self.max_ngram` (or all tokens, if "
        "there are fewer) down to `shortest`. Return the place of the first that is found, and "
        "None if none is.\n\n"
        "Keep this: the longest suffix wins. The more tokens agree, the better the guess.",
        hints=(
            "`tokens[-n:]` is the suffix of n tokens. A dictionary's key must be a tuple.",
            "range(a, b - 1, -1) counts down from a to b, b included.",
            "for n in range(min(self.max_ngram, len(tokens)), shortest - 1, -1): start = "
            "history.first[n].get(tuple(tokens[-n:])); if start is not None: return start",
        ),
        test_module="test_proposers",
        tests=(
            "test_the_longest_match_and_of_these_the_earliest",
            "test_a_history_shorter_than_the_shortest_n_gram_says_nothing",
            "test_it_finds_what_a_search_through_everything_finds",
        ),
        probe=look_ups,
        engine={"speculative": {"method": "ngram"}},
    ),
    Task(
        number="5.2",
        title="Which row judges which guess?",
        minutes=10,
        difficulty=2,
        module="spec_decode",
        place="verify_and_sample",
        names=("logits",),
        write="The target model reads the context and all guesses in one pass. Row i of its "
        "logits is about the token *behind* token i. Cut out the rows that judge the guesses, "
        "and the one behind the last guess:\n\n"
        "    fed to the target     c0   c1   c2   d0   d1   d2      context c, guesses d\n"
        "    its rows              .    .    p0   p1   p2   p3      wanted: p0 to p3\n\n"
        "`target_model.get_logits(token_ids)` gives all rows; the tokens are `context_ids` and "
        "`draft_tokens`. Put the wanted ones, one more than there are guesses, into `logits`.\n\n"
        "Keep this: a guess is judged by what the target said before it had seen that guess. "
        "With no guesses at all, one row is left, and this is plain decoding.",
        hints=(
            "Which row would a plain decoding step use, after reading the context alone?",
            "It is the row of the last context token. With 3 context tokens that is row 2.",
            "target_model.get_logits([*context_ids, *draft_tokens])[len(context_ids) - 1 :]",
        ),
        test_module="test_spec_decode",
        tests=(
            "test_drafts_are_kept_up_to_the_first_that_is_wrong",
            "test_a_draft_is_judged_by_the_row_before_it_and_not_by_its_own",
            "test_without_drafts_a_step_is_plain_decoding",
            "test_greedy_tokens_are_those_of_plain_decoding",
        ),
        probe=judged_rows,
        engine=None,
    ),
    Task(
        number="5.3",
        title="Accept a guess, or not",
        minutes=15,
        difficulty=2,
        module="rejection_sampler",
        place="rejection_sample",
        names=("is_accepted", "num_accepted"),
        write="A guess d was drawn from the draft's distribution q, and the target has p. Accept "
        "it with probability min(1, p(d) / q(d)): then what is accepted comes out as often as "
        "p says.\n\n"
        "`p` and `q` hold p(d) and q(d) of every guess, one row for each request and one column "
        "for each place. `accept_u[layout.draft_index]` holds a random number u in [0, 1) for "
        "each. Make `is_accepted`, a tensor of bool: u < p / q. Write it without a division, so "
        "that q = 0 makes no NaN.\n\n"
        "Then `num_accepted`, for each request: how many guesses come before its first rejected "
        "one. `layout.count_leading(flags)` counts the leading true ones of each row. A guess "
        "counts only if it is a token at all: `is_token[layout.draft_index]`.\n\n"
        "Keep this: a guess with p = 0 is never accepted. What was guessed behind a rejected "
        "one never counts: it continues a text that will not be.",
        hints=(
            "Multiply both sides of u < p / q with q.",
            "Compare with `<`, not with `<=`: u can be 0, and p can be 0.",
            "is_accepted = accept_u[layout.draft_index] * q < p; num_accepted = "
            "layout.count_leading(is_accepted & is_token[layout.draft_index])",
        ),
        test_module="test_rejection_sampler",
        tests=(
            "test_at_the_quotient_itself_the_product_decides",
            "test_impossible_tokens_stay_out",
            "test_a_draft_behind_a_rejected_one_never_counts",
            "test_the_bonus_token_comes_only_behind_all_drafts",
            "test_an_id_that_is_no_token_is_never_emitted_and_its_place_has_the_law_of_p",
            "test_a_step_has_the_law_of_the_target",
        ),
        probe=accepted,
        engine={"speculative": {"method": "draft"}},
    ),
    Task(
        number="5.4",
        title="What comes in the place of a rejected guess",
        minutes=20,
        difficulty=3,
        module="rejection_sampler",
        place="rejection_sample",
        names=("residual",),
        write="A guess was rejected, and another token takes its place. Drawing it from p would "
        "be wrong: tokens that q proposes too often would still come out too often. What is "
        "missing after the accepted guesses is the part of p that q does not cover.\n\n"
        "`weights` has p of the row in question, one row for each request, `[num_reqs, "
        "vocab_size]`. Make `residual` of the same shape: max(p - q, 0), with q in "
        "`draft_probs[first_rejected]`. It need not sum to 1.\n\n"
        "If `draft_probs` is None, the guess was certain: q is 1 at the guess and 0 elsewhere. "
        "The guess itself is `nearest[first_rejected]`, one for each request. What is p - q "
        "then, where it is positive?\n\n"
        "Keep this: the rejected guess has p < q, so its own weight is 0.",
        hints=(
            "For a certain guess, no subtraction is needed: one entry of each row becomes 0.",
            "`.clamp(min=0)` is the positive part. `draft_probs` may be of another dtype: "
            "`.to(weights.dtype)`.",
            "weights.scatter(1, nearest[first_rejected][:, None], 0.0) if draft_probs is None, "
            "else (weights - draft_probs[first_rejected].to(weights.dtype)).clamp(min=0)",
        ),
        test_module="test_rejection_sampler",
        tests=(
            "test_a_step_has_the_law_of_the_target",
            "test_certain_drafts_need_no_probabilities",
            "test_decisions_change_where_theory_says",
            "test_a_rejection_that_leaves_nothing_draws_from_p",
        ),
        probe=residuals,
        engine={"speculative": {"method": "draft"}},
    ),
)
