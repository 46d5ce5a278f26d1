from importlib.util import find_spec
from sys import modules

__version__ = "0.1.0"

if not all(name in modules or find_spec(name) for name in ("torch", "request")):  # chapter 1's
    raise ModuleNotFoundError(
        "this Python has not all that the engine needs: run `make demo` once, which makes .venv, "
        "and then `. .venv/bin/activate`"
    )
