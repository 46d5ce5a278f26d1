"""Run a small engine on a reader's module, with settings that make it use task N's module:
`python -m workshop.tasks.demo_on_yours N FILE`."""

from __future__ import annotations

import sys
import textwrap
import traceback
from pathlib import Path
from typing import Any

from workshop.practice.module_swap import ModuleSwap, name_of

NUM_PROMPTS = 2
MAX_TOKENS = 32
TEMPERATURE = 0.7  # and no seeds: greedy and seeded requests are verified by matching alone


def engine_on(options: dict[str, Any]) -> Any:
    """Return an engine with these settings that has served some of the demo's prompts, and its
    run."""
    from common.demo import PROMPTS, run
    from common.llm import LLM, SamplingParams

    usual: dict[str, Any] = {"dtype": "float32", "num_blocks": 200}
    llm = LLM(device="cpu", compile=False, **(usual | options))
    params = [
        SamplingParams(temperature=TEMPERATURE, max_tokens=MAX_TOKENS, ignore_eos=True)
    ] * NUM_PROMPTS
    return llm, run(llm, list(PROMPTS[:NUM_PROMPTS]), params, progress=False)


def main() -> int:
    from workshop.practice.tasks.course import task_numbered

    task = task_numbered(sys.argv[1])
    assert task is not None
    swap = ModuleSwap(name_of(task.path), Path(sys.argv[2]))
    swap.install()
    try:
        swap.check()
        if task.example is not None:
            print(f"A small example, with your {task.place}:\n")
            print(textwrap.indent("\n".join(task.example()), "    "))
        if task.engine is None:
            print(f"\nThe engine does not run {task.place}.")
            return 0
        print("\nThe engine, with your lines:")
        llm, run = engine_on(task.engine)
    except Exception as error:
        places = [
            f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(swap.file)
        ]
        at = f", at your line: {places[-1].line}" if places else ""
        print(f"It stopped with {type(error).__name__}: {error}{at}")
        return 1
    from common.demo import print_outputs, print_summary

    print_outputs(run.outputs)
    print_summary(run, llm)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # the parent process reports it
        sys.exit(130)
