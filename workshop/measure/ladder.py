"""`python -m workshop.ladder`: the engine with one chapter more at a time (`bench/`)."""

from __future__ import annotations

import sys

from workshop.measure.bench.ladder_bench import main

if __name__ == "__main__":
    sys.exit(main())
