"""Generate text for a batch of prompts and show what the engine did.

python -m common.demo                                  the shipped checkpoint, its own prompts
python -m common.demo --prompt "class Stack:" --trace
python -m common.demo --compare-sequential             the same work one request at a time
python -m common.demo --compare-sequential --dtype bfloat16             why its tokens may differ
python -m common.demo --compare-sequential --dtype bfloat16 --batch-invariant   and how they do not
python -m common.demo --grammar                        JSON with a grammar, and not JSON without
python -m common.demo --events run.jsonl               write the events of each step to a file
python -m common.demo --adapters                       each prompt with an adapter and without
python -m common.demo --model DIRECTORY_OR_HUB_ID --prompt "Hello"

Every field of `EngineConfig` is an option, too, as it is of the server.

See common/README.md"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle, islice, zip_longest
from pathlib import Path
from typing import Any

from common.serve.flags import add_engine_flags, engine_settings

# With FIRST_SEED and the default settings, the shipped checkpoint continues these sensibly. No
# prompt ends in a line break, because the tokenizer joins it with the spaces that follow it.
PROMPTS = (
    "def read_lines(path):\n    with open(path) as",
    "def fibonacci(n):\n    if n",
    "import os\nimport sys\n\n\ndef main():",
    "def is_prime(n):\n    for",
    "class TestStack(unittest.TestCase):\n    def test_push(self):",
    'def mean(values):\n    """Return the arithmetic mean of the values."""',
    'def quote(s):\n    """Return a shell-escaped version of the string *s*."""',
    'class Stack:\n    """A last-in, first-out stack."""',
)
# Heads of functions for which the shipped adapter writes tests.
HEADS = (
    'def area(width, height):\n    """Return the area of a rectangle."""',
    'def mean(values):\n    """Return the arithmetic mean of the values."""',
    'def split_words(text, separator):\n    """Split the text at each separator."""',
)
# For `--grammar`.
GRAMMAR_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z_]{2,20}$"},
        "arguments": {
            "type": "array",
            "items": {"type": "string", "pattern": "^[a-z_]{1,12}$"},
            "maxItems": 4,
        },
        "returns": {"enum": ["int", "str", "bool", "list", None]},
    },
    "required": ["name", "arguments", "returns"],
    "additionalProperties": False,
}
GRAMMAR_EXAMPLE = """\
def add(first, second):
    return first + second

signature = {"name": "add", "arguments": ["first", "second"], "returns": "int"}


"""
GRAMMAR_HEADS = (
    "def is_even(number):\n    return number % 2 == 0",
    "def join(words, sep):\n    return sep.join(words)",
    "def first(items):\n    return items[0]",
    "def read_lines(path):\n    return open(path).readlines()",
)
ADAPTER = "tests"
Adapters = list[str | None] | None  # one for each prompt
FIRST_SEED = 17  # seed of the first prompt; each later prompt adds 1
TOP_P = 0.9
REPETITION_PENALTY = 1.1


@dataclass(frozen=True, slots=True)
class Run:
    """The result of one timed run over all prompts."""

    outputs: list
    seconds: float
    num_steps: int

    @property
    def output_tokens(self) -> int:
        return sum(len(c.token_ids) for output in self.outputs for c in output.outputs)

    @property
    def output_tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m common.demo",
        description="Generate text for a batch of prompts and show what the engine did.",
        conflict_handler="resolve",  # two options of the engine are simpler here
    )
    add_engine_flags(parser.add_argument_group("options of the engine"))
    add = parser.add_argument
    add("--model", help="directory or hub id (default: the shipped checkpoint)")
    add("--prompt", action="append", default=[], metavar="P", help="may be given repeatedly")
    add("--prompts-file", type=Path, metavar="F", help="one prompt a line")
    add("--num-prompts", type=int, metavar="N", help="repeat or cut the prompts to N")
    add("--max-tokens", type=int, default=96, metavar="N")
    add("--temperature", type=float, default=0.7, metavar="T", help="0 is greedy")
    add("--seed", type=int, default=FIRST_SEED, metavar="N", help="of the first prompt")
    add("--compare-sequential", action="store_true", help="the same work one request at a time")
    add("--grammar", action="store_true", help="functions described as JSON, with and without")
    add("--trace", action="store_true", help="the seven stages of every step")
    add("--events", type=Path, metavar="F", help="write what happens to this file")
    add("--adapters", action="store_true", help="each prompt with the shipped adapter and without")
    add("--speculative", choices=("ngram", "draft"), help="how draft tokens are proposed")
    return parser.parse_args(argv)


def load_prompts(args: argparse.Namespace) -> list[str]:
    """Return the prompts that the arguments ask for. Raises `ValueError` or `FileNotFoundError` for
    invalid arguments."""
    prompts = args.prompt
    if args.prompts_file is not None:
        text = args.prompts_file.read_text(encoding="utf-8")
        prompts += [line for line in text.splitlines() if line.strip()]
    prompts = prompts or (HEADS if args.adapters else PROMPTS)
    if args.num_prompts is not None:
        if args.num_prompts < 1:
            raise ValueError(f"--num-prompts must be >= 1, got {args.num_prompts}")
        prompts = islice(cycle(prompts), args.num_prompts)
    return [prompt for prompt in prompts for _ in range(1 + args.adapters)]


def run(
    llm,
    prompts: list[str],
    params: list,
    progress: bool,
    adapters: Adapters = None,
    is_sequential: bool = False,
) -> Run:
    """Run all prompts in one `generate` call or, on the same engine, one after the other."""
    num_steps = llm.engine.stats().num_steps
    started = time.perf_counter()
    size = 1 if is_sequential else len(prompts)
    outputs = []
    for i in range(0, len(prompts), size):
        part = slice(i, i + size)
        adapter = None if adapters is None else adapters[part]
        outputs += llm.generate(prompts[part], params[part], progress, adapter)
    seconds = time.perf_counter() - started
    return Run(outputs, seconds, llm.engine.stats().num_steps - num_steps)


def print_outputs(outputs: list) -> None:
    for output in outputs:
        completion = output.outputs[0]
        print(f"\n--- {output.request_id}: {len(output.prompt_token_ids)} prompt tokens, ", end="")
        print(f"{len(completion.token_ids)} output tokens, finished by {completion.finish_reason}")
        text = completion.text
        if sys.stdout.isatty():
            text = f"\033[32m{text}\033[0m"
        print(f"{output.prompt}{text}")


def print_beside(outputs: list) -> None:
    """Print each prompt's two texts side by side: without the adapter, and with it."""
    for plain, adapted in zip(outputs[::2], outputs[1::2]):
        print(f"\n--- {plain.prompt}")
        without = plain.outputs[0].text.strip("\n").splitlines()
        with_adapter = adapted.outputs[0].text.strip("\n").splitlines()
        print(f"\n{'without':58}| with the adapter")
        for left, right in zip_longest(without, with_adapter, fillvalue=""):
            print(f"{left[:57]:58}| {right[:57]}".rstrip())


def print_summary(result: Run, llm) -> None:
    from numpy import percentile

    def spread(seconds: list[float]) -> str:
        if not seconds:
            return "none"
        median, high = percentile(seconds, [50, 99]) * 1e3
        return f"p50 {median:.1f} ms, p99 {high:.1f} ms"

    stats = llm.engine.stats()
    metrics = [output.metrics for output in result.outputs]
    prompt_tokens = sum(len(output.prompt_token_ids) for output in result.outputs)
    mib = stats.kv_blocks_peak * llm.engine.kv_cache.kv_bytes_per_block / (1 << 20)
    print("\n=== Summary")
    print(f"requests             {len(result.outputs)}")
    print(f"steps                {result.num_steps}")
    print(f"prompt tokens        {prompt_tokens}")
    print(f"output tokens        {result.output_tokens}")
    print(f"time                 {result.seconds:.2f} s")
    print(f"output throughput    {result.output_tokens_per_second:.1f} tok/s")
    print(f"time to first token  {spread([m.time_to_first_token for m in metrics])}")
    print(f"inter-token latency  {spread([t for m in metrics for t in m.inter_token_latencies])}")
    print(
        f"KV memory            {stats.kv_blocks_peak} of {stats.kv_blocks_total} blocks held at "
        f"the peak ({mib:.1f} MiB); on average {stats.kv_waste:.0%} of "
        "what was held was not yet written"
    )
    print(
        f"prefix cache         {stats.cached_tokens} of {prompt_tokens} prompt tokens were "
        f"cached ({stats.prefix_cache_hit_rate:.0%}); {stats.kv_blocks_cached} blocks kept"
    )
    again = f"{stats.recomputed_tokens} tokens computed again"
    print(f"preemptions          {stats.num_preemptions} ({again})")
    if llm.engine.parts.drafts is not None:
        print(
            f"speculation          {stats.num_accepted_tokens} of {stats.num_drafted_tokens} "
            f"draft tokens accepted; {stats.tokens_per_pass:.2f} tokens a pass"
        )


def compare_tokens(alone: list, batched: list, dtype: object) -> str:
    """Return how many requests got the same tokens both ways and, if not all did, why."""
    pairs = zip(alone, batched, strict=True)
    num_same = sum(a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in pairs)
    if num_same == len(alone):
        return "tokens               identical"
    return (
        f"tokens               identical for {num_same} of {len(alone)} requests\n\n"
        f"The others were rounded differently. The model calculates in {dtype}, and in a batch\n"
        "the terms of a sum are added in another order than alone, which changes its last digit.\n"
        "Where two tokens are almost equally likely that decides, and from there on the two texts\n"
        "differ; neither is the better one. With --batch-invariant, or with --dtype float64, the\n"
        "tokens are identical."
    )


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    for noisy in ("httpx", "transformers", "huggingface_hub"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    try:
        return _main(args)
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _main(args: argparse.Namespace) -> int:
    prompts = load_prompts(args)
    print("Loading the model ...", file=sys.stderr)
    import common.engine  # noqa: F401  # otherwise LLM() would import it after the heap is frozen
    from common.llm import LLM, SamplingParams
    from common.requests.gc_utils import freeze_gc_heap

    freeze_gc_heap()
    # Each prompt has its own seed, so that every run and every order gives the same text.
    params = [
        SamplingParams(
            temperature=args.temperature,
            top_p=TOP_P,
            # No penalty for adapters, because a test repeats its function's name.
            repetition_penalty=1.0 if args.adapters else REPETITION_PENALTY,
            max_tokens=args.max_tokens,
            seed=args.seed + i // (1 + args.adapters),
        )
        for i in range(len(prompts))
    ]
    adapters = [None, ADAPTER] * (len(prompts) // 2) if args.adapters else None
    llm = LLM(**_settings(args))
    engine = llm.engine
    ranks = f", {engine.config.num_ranks} ranks" if engine.config.has_workers else ""
    print(
        f"{engine.model_config.architecture} on {engine.device}, {engine.dtype}: "
        f"{engine.num_parameters / 1e6:.1f} M parameters{ranks}"
    )
    progress = sys.stderr.isatty() and not args.trace
    if args.events is None:  # the warm-up must not be in the recorded events
        llm.generate(prompts[:1], SamplingParams(max_tokens=2), use_tqdm=False)
    engine.reset_prefix_cache()
    engine.reset_stats()
    if args.trace:
        engine.on_step = _tracer(engine)
    if args.grammar:
        show_grammar(llm, args.temperature, args.seed)
        return 0
    result = run(llm, prompts, params, progress, adapters)
    (print_beside if args.adapters else print_outputs)(result.outputs)
    print_summary(result, llm)
    if args.compare_sequential:
        engine.on_step = None
        engine.reset_prefix_cache()  # so that the second run finds nothing of the first
        alone = run(llm, prompts, params, False, adapters, is_sequential=True)
        print("\n=== One request at a time")
        print(f"steps                {alone.num_steps}")
        print(f"time                 {alone.seconds:.2f} s")
        print(f"output throughput    {alone.output_tokens_per_second:.1f} tok/s")
        print(f"batching is          {alone.seconds / result.seconds:.2f} times as fast")
        print(compare_tokens(alone.outputs, result.outputs, engine.dtype))
    # Alone, a request takes a step for each of its tokens, unless drafts are accepted.
    steps = "" if args.speculative else f"; one at a time they take {result.output_tokens}"
    print(f"\n{len(result.outputs)} requests shared {result.num_steps} steps{steps}.")
    if args.model is None:
        print("The text is a toy's: the shipped model has seen some Python, and nothing else.")
    print("next: make watch ARGS=--open shows a run like this one, step by step, in a browser")
    return 0


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of `EngineConfig`. The shipped checkpoint is computed in float32, so that
    every machine prints the same text."""
    from common.engine_config import SHIPPED_ADAPTER

    settings = {"dtype": "float32" if args.model is None else "auto"} | engine_settings(args)
    return settings | {
        "model": args.model,
        "events": args.events,
        "adapters": {ADAPTER: SHIPPED_ADAPTER} if args.adapters else None,
        "speculative": {"method": args.speculative} if args.speculative else None,
    }


def show_grammar(llm, temperature: float, seed: int) -> None:
    """Generate descriptions of functions as JSON, with a grammar and without. Every text with the
    grammar is complete JSON."""
    from grammars import Json
    from request import SamplingParams

    prompts = [f"{GRAMMAR_EXAMPLE}{head}\n\nsignature = " for head in GRAMMAR_HEADS]
    for title, grammar in (("with the grammar", Json(GRAMMAR_SCHEMA, 0)), ("without", None)):
        params = [
            SamplingParams(temperature=temperature, max_tokens=64, seed=seed + i, grammar=grammar)
            for i in range(len(prompts))
        ]
        print(f"\n=== {title}")
        num_json = 0
        outputs = llm.generate(prompts, params, use_tqdm=False)
        for head, output in zip(GRAMMAR_HEADS, outputs, strict=True):
            text = output.outputs[0].text
            is_json = _is_json(text)
            num_json += is_json
            label = "JSON" if is_json else "no JSON"
            name = head.split("(")[0].removeprefix("def ")
            print(f"{name:<12}{label:<9}{json.dumps(text[:90])}")
        print(f"{num_json} of {len(prompts)} are JSON")


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _tracer(engine) -> Callable:
    from common.events.step_trace import describe_step

    num_warm_up = engine.num_steps

    def show(record) -> None:
        record.step += 1 - num_warm_up  # the reader's first step is step 1
        print(describe_step(record, engine.kv_manager, engine.tokenizer.decode))

    return show


if __name__ == "__main__":
    sys.exit(main())
