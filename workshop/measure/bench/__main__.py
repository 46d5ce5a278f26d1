"""`python -m workshop.bench`: see `bench.py`."""

import sys

from workshop.measure.bench.bench import main

sys.exit(main())
