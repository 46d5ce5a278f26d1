"""Exhibits of chapter 5: guesses, and what becomes of the wrong ones."""

from __future__ import annotations

from typing import Any

from common.workshop.museum.exhibit import Exhibit, Guest, Workload
from common.workshop.museum.props import GUESS, SONG


def unread() -> str:
    import torch

    from rejection_sampler import rejection_sampling_batched

    says, guesses = torch.tensor([5, 6, 7, 8]), torch.tensor([1, 6, 7])
    tokens, num = rejection_sampling_batched(says, guesses, torch.tensor([0, 4]), 3)
    return f"the model says 5 6 7 8, the guesses are 1 6 7; emitted: {tokens[0, : num[0]].tolist()}"


def the_latest_match() -> str:
    from input_batch import RunnerRequest
    from proposers import FollowedRequest, NgramProposer
    from request import SamplingParams

    song = [5] * 9  # la la la
    request = RunnerRequest("r", SamplingParams(), song, [])
    drafts = NgramProposer(4).propose([FollowedRequest(request, 0, len(song) - 1)], [4])
    return f"nine times the same token; four guesses are wanted, made: {drafts['r']}"


def a_point_on_a_border() -> str:
    import torch

    from inverse_cdf import draw

    weights = torch.tensor([[0.0, 0.5, 0.5]], dtype=torch.float64)
    index, _ = draw(weights, torch.tensor([0.0], dtype=torch.float64))
    return f"weights 0, 0.5, 0.5, drawn with u = 0: token {int(index)}"


def make_scheduler(**options: Any) -> Any:
    from draft_plugin import DraftPlugin
    from scheduler import Scheduler

    return Scheduler(num_gpu_blocks=20, block_size=4, plugins=[DraftPlugin()], **options)


def begin(scheduler: Any, guesses: list[int], max_tokens: int = 20) -> Any:
    """A request with a prompt of 6 tokens, one token sampled, and guesses about the next."""
    from request import Request
    from scheduler_interface import StepOutput

    request = Request.from_tokens("r", [1, 2, 3, 4, 5, 6], max_tokens)
    scheduler.add_request(request)
    output = StepOutput({"r": [7]})
    output.draft_token_ids = {"r": guesses}
    scheduler.update_from_output(scheduler.schedule(), output)
    return request


def a_guess_in_the_cache() -> str:
    from scheduler_interface import StepOutput

    scheduler = make_scheduler()
    request = begin(scheduler, guesses=[50, 51, 52])
    scheduler.update_from_output(scheduler.schedule(), StepOutput({"r": [8]}))  # all are wrong
    cache = scheduler.kv_memory.cache
    num_published = 4 * sum(1 for _ in cache.cached_prefixes())
    return (
        f"the KV of {request.num_computed_tokens} positions is of verified tokens; "
        f"published: {num_published} positions"
    )


def beyond_the_last_token() -> str:
    scheduler = make_scheduler()
    request = begin(scheduler, guesses=[8, 9, 10, 11], max_tokens=3)
    plan = scheduler.schedule()
    end = plan.start_positions[0] + plan.num_scheduled_tokens["r"]
    return f"the request can have {request.max_num_tokens} tokens; the step writes up to {end}"


def last_steps_guesses() -> str:
    from scheduler_interface import StepOutput

    scheduler, fed = make_scheduler(), []
    begin(scheduler, guesses=[50, 51])
    for token in (8, 9):
        plan = scheduler.schedule()
        fed.append(plan.scheduled_draft_token_ids.get("r", []))
        scheduler.update_from_output(plan, StepOutput({"r": [token]}))
    return f"guesses that the model is fed, step by step: {fed}"


EXHIBITS = (
    Exhibit(
        trap=36,
        origin="reported, without a number",
        title="The first guess is never judged",
        seen="Each run of guesses was judged from the second on; the first was taken as it came. "
        "With a good draft model the text is nearly right, and the acceptance rate is excellent.",
        lesson="A guess is judged by the row before it. Test with guesses that are wrong at "
        "every place, the first above all, and distrust a rate that is too good.",
        demonstrate=unread,
        wrong="the model says 5 6 7 8, the guesses are 1 6 7; emitted: [1, 6, 7, 8]",
        right="the model says 5 6 7 8, the guesses are 1 6 7; emitted: [5]",
        watch=Workload(
            look="Read the guesses of step 2: the first is wrong, and stands in the text.",
            parts="step 2, computed, a",
            guests=(Guest("a", SONG, 14),),
            config={"speculative": GUESS},
        ),
    ),
    Exhibit(
        trap=43,
        origin="nano-vllm #39",
        title="A random number on the border",
        seen="Now and then a random number is exactly 0. There it divided by zero; here it would "
        "choose a token whose probability is 0: one that a constraint forbids.",
        lesson="Say which end of an interval is closed, and test with the numbers at the ends, "
        "which no random test will ever meet.",
        demonstrate=a_point_on_a_border,
        wrong="weights 0, 0.5, 0.5, drawn with u = 0: token 0",
        right="weights 0, 0.5, 0.5, drawn with u = 0: token 1",
        watch="A random number falls on such a border once in many millions of draws.",
    ),
    Exhibit(
        trap=44,
        origin="vLLM #22437",
        title="The latest match has nothing behind it",
        seen="Of several places where the last words stood before, the latest was taken. In text "
        "that repeats itself that one is at the very end, and has hardly a token behind it: short "
        "guesses exactly where long ones would have come true.",
        lesson="The longest match, and of equals the earliest: it has the most to say. Nothing "
        "is wrong in the output, so only a test of the guesses sees it.",
        demonstrate=the_latest_match,
        wrong="nine times the same token; four guesses are wanted, made: [5]",
        right="nine times the same token; four guesses are wanted, made: [5, 5, 5, 5]",
        watch=Workload(
            look="Look at the guesses of step 1: they come from the first place where these words "
            "stand, or from the latest.",
            parts="step 1, planned, a",
            guests=(Guest("a", SONG, 14),),
            config={"speculative": GUESS},
        ),
    ),
    Exhibit(
        trap=13,
        origin="vLLM #12193 #18668",
        title="A wrong guess is cached for everybody",
        seen="The KV of guesses that were refused counted as written. If that filled a block, it "
        "was published, and the next request with this prefix was served KV of a word that was "
        "never said.",
        lesson="Publish what is verified, not what is written. Other users' mistakes last as "
        "long as the cache.",
        room="05_spec_decode",
        demonstrate=a_guess_in_the_cache,
        wrong="the KV of 7 positions is of verified tokens; published: 8 positions",
        right="the KV of 7 positions is of verified tokens; published: 4 positions",
        watch=Workload(
            look="Look at what is published in step 9: a block whose last token is a guess that "
            "was refused.",
            parts="step 9, published, b",
            guests=(
                Guest("a", SONG, 14),
                Guest("b", f"{SONG} 3, 4]\ne = [1, 2, 3", 10, 8),
            ),
            config={"speculative": GUESS},
        ),
    ),
    Exhibit(
        trap=39,
        origin="vLLM #16087 #24662",
        title="Guesses beyond the last token",
        seen="Guesses went on behind the last token that a request may have. Near "
        "`max_model_len` they were written to positions that have no block, or no rotation: a "
        "crash at the very end of long answers.",
        lesson="Trim guesses by everything that limits tokens: the length, the budget, the "
        "memory. The token behind them needs its place too.",
        demonstrate=beyond_the_last_token,
        wrong="the request can have 9 tokens; the step writes up to 11",
        right="the request can have 9 tokens; the step writes up to 8",
        watch=Workload(
            look="The request may have three tokens more. Count the guesses of step 1.",
            parts="step 1, planned, a",
            guests=(Guest("a", SONG, 20),),
            config={"speculative": GUESS, "max_model_len": 46},
        ),
    ),
    Exhibit(
        trap=40,
        origin="vLLM #46899",
        title="Guesses from an earlier step",
        seen="Guesses stayed with a request when their step was over, and entered the model in a "
        "later one, at places where they had never been meant: work for nothing at best, "
        "placeholder ids in the model at worst.",
        lesson="A guess is for one step. Taking it out of the box empties the box.",
        demonstrate=last_steps_guesses,
        wrong="guesses that the model is fed, step by step: [[50, 51], [50, 51]]",
        right="guesses that the model is fed, step by step: [[50, 51], []]",
        watch=Workload(
            look="Look at the guesses of step 3: they are those of a step before.",
            parts="step 3, planned, a",
            guests=(Guest("a", SONG, 14),),
            config={"speculative": GUESS},
        ),
    ),
)
