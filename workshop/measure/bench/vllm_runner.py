"""vLLM's side of two pipes: this file is run by the Python of vLLM's own environment.

    python vllm_runner.py SETTINGS.json          the engine's arguments, and the model's directory

This file imports nothing of this repository. It makes the engine, reports that, and then answers:
each line on standard input names a file of requests and one for the answer.

    requests    [{"prompt_token_ids": [5, 7], "max_tokens": 3}, ...]
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
from pathlib import Path
from typing import Any

READY, DONE = "ready", "done"


def make_engine(settings: dict[str, Any]) -> Any:
    from vllm import LLM  # pyright: ignore[reportMissingImports]

    return LLM(skip_tokenizer_init=True, disable_log_stats=True, **settings).llm_engine


def serve(engine: Any, requests: list[dict[str, Any]]) -> dict[str, Any]:
    """Time the requests, all there at the start."""
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

    names = [str(i) for i in range(len(requests))]
    token_ids: dict[str, list[int]] = {name: [] for name in names}
    token_times: dict[str, list[float]] = {name: [] for name in names}
    own_name = {name: name for name in names}
    num_steps, start, cpu_start = 0, time.perf_counter(), time.process_time()
    for name, request in zip(names, requests):
        params = SamplingParams(
            temperature=0.0, max_tokens=request["max_tokens"], ignore_eos=True, detokenize=False
        )
        prompt = {"prompt_token_ids": request["prompt_token_ids"]}
        given = engine.add_request(name, prompt, params)
        own_name[given or name] = name  # newer versions add letters to the name
    while engine.has_unfinished_requests():
        outputs = engine.step()
        num_steps += bool(outputs)
        now = time.perf_counter() - start
        for output in outputs:
            name = own_name[output.request_id]
            tokens = list(output.outputs[0].token_ids)  # all until now
            token_times[name] += [now] * (len(tokens) - len(token_ids[name]))
            token_ids[name] = tokens
    seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "cpu_seconds": time.process_time() - cpu_start,  # of all threads
        "num_steps": num_steps,
        "token_ids": [token_ids[name] for name in names],
        "token_times": [token_times[name] for name in names],
    }


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    import vllm  # pyright: ignore[reportMissingImports]

    engine = make_engine(settings)
    answers.write(f"{READY} {vllm.__version__}\n")
    for line in sys.stdin:
        source, target = json.loads(line)
        answer = serve(engine, json.loads(Path(source).read_text(encoding="utf-8")))
        Path(target).write_text(json.dumps(answer), encoding="utf-8")
        answers.write(f"{DONE}\n")


if __name__ == "__main__":
    main()
