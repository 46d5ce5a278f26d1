"""`python -m workshop.bench`: see `bench.py`."""

import sys

from workshop.bench.bench import main

sys.exit(main())
