"""`python -m common.workshop.bench`: see `bench.py`."""

import sys

from common.workshop.bench.bench import main

sys.exit(main())
