from importlib.util import find_spec

__version__ = "0.1.0"

if find_spec("torch") is None or find_spec("request") is None:  # PyTorch, and chapter 1
    raise ModuleNotFoundError(
        "this Python has not all that the engine needs: run `make demo` once, which makes .venv, "
        "and then `. .venv/bin/activate`"
    )
