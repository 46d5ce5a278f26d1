"""`python -m common.bench`: see `bench.py`."""

import sys

from common.bench.bench import main

sys.exit(main())
