"""Code that teaches and measures the engine but is not part of it: the engine imports none of this.

`python -m workshop.NAME` finds NAME in each of the folders below; imports name the folder, too.
Ctrl-C ends such a command without a traceback."""

import sys

__path__ += [
    f"{__path__[0]}/{folder}" for folder in ("book", "practice", "watch", "measure", "site")
]

if sys.argv[0] == "-m":  # it is being looked for

    def report(kind, error, traceback, report=sys.excepthook):
        if issubclass(kind, KeyboardInterrupt):
            print("interrupted", file=sys.stderr)
        else:
            report(kind, error, traceback)

    sys.excepthook = report
