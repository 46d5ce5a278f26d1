"""`python -m common.ladder`: the engine with one chapter more at a time (`common/bench`)."""

from __future__ import annotations

import sys

from common.bench.ladder_bench import main

if __name__ == "__main__":
    sys.exit(main())
