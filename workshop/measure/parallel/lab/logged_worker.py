"""A worker that notes when its stage computed: `plot_pipeline.py` starts it in place of
`common/runner/worker.py`. At its end it writes the intervals into `STAGE_LOG_FOLDER`."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from common.parallel.stage import StageRunner
from common.runner import worker

FOLDER = "STAGE_LOG_FOLDER"


def main(argv: list[str]) -> None:
    intervals: list[tuple[float, float, int]] = []  # seconds of time.monotonic(), tokens
    stages: set[int] = set()
    compute, serve = StageRunner.compute, worker.serve

    def timed(runner, batch):
        start = time.monotonic()
        out = compute(runner, batch)
        intervals.append((start, time.monotonic(), len(batch.positions)))
        stages.add(runner.model.collectives.ranks.stage)
        return out

    def served(*ends) -> None:
        serve(*ends)
        for stage in stages:
            path = Path(os.environ[FOLDER]) / f"{stage}.json"
            path.write_text(json.dumps(intervals), encoding="utf-8")

    setattr(StageRunner, "compute", timed)  # noqa: B010
    worker.serve = served
    worker.main(argv)


if __name__ == "__main__":
    main(sys.argv[1:])
