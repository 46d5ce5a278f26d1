"""Exhibits of the engine around the chapters: sampling, text, one bad row."""

from __future__ import annotations

from common.workshop.museum.exhibit import Exhibit, Guest, Workload
from common.workshop.museum.props import CODE, GUESS, SONG, say


def a_token_from_the_middle() -> str:
    from common.llm import SamplingParams

    prompts = [CODE, "Once upon a time"]
    params = SamplingParams(temperature=0, max_tokens=12)
    whole, pieces = say(prompts, params), say(prompts, params, chunked_prefill=8)
    return f"whole:     {whole[0]}\nin pieces: {pieces[0]}"


def constraints_on_the_last_row() -> str:
    from common.llm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=12, presence_penalty=2.0)
    plain, guessed = say([SONG], params), say([SONG], params, speculative=GUESS)
    return f"plain:        {plain[0]}\nwith guesses: {guessed[0]}"


def a_seed_that_is_not_asked() -> str:
    from common.llm import SamplingParams

    params = SamplingParams(temperature=0.8, seed=7, max_tokens=16)
    plain, guessed = say([SONG], params), say([SONG], params, speculative=GUESS)
    return f"seed 7, plain decoding and with guesses: the same text: {plain == guessed}"


def a_lane_that_is_no_token() -> str:
    import torch

    from common.sampling.sampler import Sampler

    logits = torch.zeros(1, 8)
    logits[0, 6] = 9.0  # the matrix was padded from 6 to 8 rows
    logits[0, 2] = 1.0
    token = int(Sampler(vocab_size=6).raw_logits(logits).argmax())
    return f"a vocabulary of 6 tokens in a matrix of 8 rows: token {token} wins"


def at_the_border_of_top_p() -> str:
    import torch

    from common.sampling.sampling_constraints import NEG_INF, apply_top_p

    probs = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64)
    kept = apply_top_p(probs.log(), torch.tensor([0.7], dtype=torch.float64)) > NEG_INF
    return f"probabilities 0.5, 0.3, 0.2 and top_p 0.7: tokens kept: {int(kept.sum())}"


def halves_of_characters() -> str:
    from common.engine_config import SHIPPED_CHECKPOINT
    from common.tokenizer import IncrementalDetokenizer, load_tokenizer

    tokenizer = load_tokenizer(SHIPPED_CHECKPOINT)
    detokenizer, pieces = IncrementalDetokenizer(tokenizer, tokenizer.encode("a")), []
    for token in tokenizer.encode("naïve 你好 👍"):
        detokenizer.append(token)
        pieces.append(detokenizer.take_delta())
    return "streamed: " + "".join(pieces)


def one_bad_row() -> str:
    from dataclasses import dataclass

    import torch

    from common.sampling.sampler import Sampler
    from common.sampling.sampling_columns import SamplingBatch
    from common.tests.sampling_cases import make_sampling
    from request import SamplingParams

    logits = torch.tensor([[0.0, 1.0], [float("nan"), 0.0], [1.0, 0.0]])

    @dataclass
    class Batch:
        sampling: SamplingBatch

    batch = Batch(make_sampling([SamplingParams(temperature=0)] * 3))
    output = Sampler(2).sample(logits, batch)
    return f"three requests, one with NaN logits; served: {sorted(output.token_ids)}"


EXHIBITS = (
    Exhibit(
        trap=31,
        origin="mini-sglang",
        title="A token is sampled in the middle of a prompt",
        seen="Each piece of a prompt gave a token, as if the prompt had ended there. The token "
        "was written behind the piece, where the prompt goes on, and the rest of the answer "
        "followed from words that nobody had asked.",
        lesson="Only the piece that reaches the last known token has something to predict. Let "
        "the counters say so, not the kind of request.",
        demonstrate=a_token_from_the_middle,
        wrong='whole:     \'"""Show a bit of X-level widget for\'\n'
        "in pieces: '\\n    barpth = 0\\n    for i in range(0'",
        right='whole:     \'"""Show a bit of X-level widget for\'\n'
        'in pieces: \'"""Show a bit of X-level widget for\'',
        watch=Workload(
            look="The prompt comes in pieces of eight. Look at what the first piece says.",
            parts="step 0, computed, a",
            guests=(Guest("a", CODE, 12),),
            config={"chunked_prefill": 8},
        ),
    ),
    Exhibit(
        trap=37,
        origin="vLLM #42744 #42802",
        title="Constraints that hold for the last token only",
        seen="Penalties, bad words and min-p were applied to the token behind the guesses, not "
        "to the guesses. What a request had forbidden came out after all, as soon as speculation "
        "was switched on and a guess was good.",
        lesson="Speculation may not change what can be said. Every constraint holds at every "
        "position, with the guesses before it as history.",
        demonstrate=constraints_on_the_last_row,
        wrong="plain:        ' 4]\\nb = [2, 2, 3,'\nwith guesses: ' 4]\\nb = [2, 2, 4]'",
        right="plain:        ' 4]\\nb = [2, 2, 3,'\nwith guesses: ' 4]\\nb = [2, 2, 3,'",
        watch=Workload(
            look="What was said already is made unlikely. Compare the tokens that are accepted in "
            "step 5.",
            parts="step 5, computed, a",
            guests=(Guest("a", SONG, 12, sampling={"presence_penalty": 2.0}),),
            config={"speculative": GUESS},
        ),
    ),
    Exhibit(
        trap=42,
        origin="vLLM #6038",
        title="The seed is not asked",
        seen="A request came with a seed and was answered differently every time: with "
        "speculation the tokens were drawn from the process's own generator.",
        lesson="With a seed, every random number is a function of the request and the position, "
        "whatever is switched on, whoever else is in the batch.",
        demonstrate=a_seed_that_is_not_asked,
        wrong="seed 7, plain decoding and with guesses: the same text: False",
        right="seed 7, plain decoding and with guesses: the same text: True",
        watch=Workload(
            look="Each comes with a seed of its own. Their tokens are others from step 1 on, "
            "and others again when the film is made once more.",
            parts="step 1, computed",  # of whom is left to chance
            guests=tuple(
                Guest(f"s{n}", SONG, sampling={"temperature": 1.0, "seed": n}) for n in range(8)
            ),
            config={"speculative": GUESS, "num_blocks": 100},
        ),
    ),
    Exhibit(
        trap=43,
        origin="vLLM #50379",
        title="A token that does not exist wins",
        seen="The output matrix is padded to a round number of rows. Behind the vocabulary "
        "stands whatever the padding holds, and now and then it was the largest: an id that the "
        "tokenizer does not know.",
        lesson="A padded lane is not a small number, it is no number. Cut it off before anything "
        "looks for a maximum or a sum.",
        demonstrate=a_lane_that_is_no_token,
        wrong="a vocabulary of 6 tokens in a matrix of 8 rows: token 6 wins",
        right="a vocabulary of 6 tokens in a matrix of 8 rows: token 2 wins",
        watch="The shipped model's matrix has no row behind its vocabulary.",
    ),
    Exhibit(
        trap=43,
        origin="nano-vllm #260",
        title="Top-p drops the token at its border",
        seen="The token with which the sum reaches `top_p` was cut off as well. With the usual "
        "0.9 the text is a little too tame; with a small value only the likeliest token is left.",
        lesson="Top-p keeps the fewest tokens whose sum reaches p, the one that reaches it "
        "included. Test on the border, with numbers a pencil can add.",
        demonstrate=at_the_border_of_top_p,
        wrong="probabilities 0.5, 0.3, 0.2 and top_p 0.7: tokens kept: 1",
        right="probabilities 0.5, 0.3, 0.2 and top_p 0.7: tokens kept: 2",
        watch=Workload(
            look="Drawn with a seed and top_p 0.3. Compare the tokens of step 1.",
            parts="step 1, computed, a",
            guests=(Guest("a", CODE, 12, sampling={"temperature": 1.0, "seed": 3, "top_p": 0.3}),),
        ),
    ),
    Exhibit(
        trap=47,
        origin="vLLM #48853 #44620",
        title="Half a character",
        seen="Each token was turned into text by itself. A character of several bytes may be "
        "spread over several tokens, and arrived as question marks: most of Chinese, every emoji, "
        "and nothing that an English test contains.",
        lesson="Tokens are bytes, text is characters. Keep the bytes of an unfinished character "
        "until it is complete, and test with text that is not English.",
        demonstrate=halves_of_characters,
        wrong="streamed: na��ve ������ ����",
        right="streamed: naïve 你好 👍",
        watch=Workload(
            look="Read the prompt: the pieces of a character.",
            parts="step 0, arrived, a",
            guests=(Guest("a", "naïve 你好 👍", 8),),
        ),
    ),
    Exhibit(
        trap=61,
        origin="ours",
        title="One bad row ends them all",
        seen="One request overflowed and its logits were NaN. The sampler raised an error, the "
        "step failed, and with it everybody who happened to be in the same batch.",
        lesson="In a batch an error belongs to a row. End that request with a reason; the others "
        "have nothing to do with it.",
        demonstrate=one_bad_row,
        wrong="FloatingPointError: no finite maximum",
        right="three requests, one with NaN logits; served: ['r0', 'r2']",
        watch="The shipped model has no bad rows.",
    ),
)
