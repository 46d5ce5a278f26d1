"""vLLM's side of two pipes: this file is run by the Python of vLLM's own environment.

    python vllm_runner.py SETTINGS           JSON: the engine's arguments, and the model's directory

This file imports nothing of this repository. It makes the engine, writes its version, and then
answers: a line of requests on standard input with a line on standard output.

    requests    [[[5, 7], 3], ...]                     prompts, and numbers of tokens
    answer      {"seconds": 1.5, "cpu_seconds": 2.9, "token_ids": [[9, 9, 4], ...], "num_steps": 3,
                 "token_times": [[0.5, 1.0, 1.5], ...]}      seconds since the first was added

All requests are added at the same time, are greedy, and continue past any end of text. The loop is
that of vLLM's own `LLM.generate`. vLLM's prints go to standard error, because this protocol has the
only copy of standard output."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def make_engine(settings: dict[str, Any]) -> Any:
    from vllm import LLM  # pyright: ignore[reportMissingImports]

    return LLM(skip_tokenizer_init=True, disable_log_stats=True, **settings).llm_engine


def serve(engine: Any, requests: list[tuple[list[int], int]]) -> dict[str, Any]:
    """Time the requests, all there at the start."""
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

    token_ids: list[list[int]] = [[] for _ in requests]
    token_times: list[list[float]] = [[] for _ in requests]
    place_of: dict[str, int] = {}
    num_steps, start, cpu_start = 0, time.perf_counter(), time.process_time()
    for place, (prompt, max_tokens) in enumerate(requests):
        params = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        given = engine.add_request(f"{place}", {"prompt_token_ids": prompt}, params)
        place_of[given or f"{place}"] = place  # newer versions add letters to the name
    while engine.has_unfinished_requests():
        outputs = engine.step()
        num_steps += bool(outputs)
        now = time.perf_counter() - start
        for output in outputs:
            place = place_of[output.request_id]
            tokens = list(output.outputs[0].token_ids)  # all until now
            token_times[place] += [now] * (len(tokens) - len(token_ids[place]))
            token_ids[place] = tokens
    return {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - cpu_start,  # of all threads
        "num_steps": num_steps,
        "token_ids": token_ids,
        "token_times": token_times,
    }


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import vllm  # pyright: ignore[reportMissingImports]

    engine = make_engine(json.loads(sys.argv[1]))
    print(json.dumps({"version": vllm.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(serve(engine, json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
