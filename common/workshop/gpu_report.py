"""`python -m common.workshop.gpu_report`: what kernels and engine do on this GPU (`bench/`)."""

from __future__ import annotations

import sys

from common.workshop.bench.gpu_command import main

if __name__ == "__main__":
    sys.exit(main())
