"""Run a small engine on a reader's module, with settings that make it use task N's module:
`python -m workshop.tasks.demo_on_yours N FOLDER`."""

from __future__ import annotations

import sys
import tempfile
import textwrap
import traceback
from pathlib import Path
from typing import Any

from workshop.practice.tasks.course import task_numbered
from workshop.practice.tasks.mine import install
from workshop.practice.tasks.workbench import Workbench

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
    task, bench = task_numbered(sys.argv[1]), Workbench(Path(sys.argv[2]))
    assert task is not None
    with tempfile.TemporaryDirectory(prefix="mine-") as folder:
        try:
            for swap in install([task], bench, Path(folder).resolve()):
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
            frames = traceback.extract_tb(error.__traceback__)
            places = [f.line for f in frames if f.filename.startswith(folder)]
            at = f", at your line: {places[-1]}" if places else ""
            print(f"It stopped with {type(error).__name__}: {error}{at}")
            return 1
    from common.demo import print_outputs, print_summary

    print_outputs(run.outputs)
    print_summary(run, llm)
    return 0


if __name__ == "__main__":
    sys.exit(main())
