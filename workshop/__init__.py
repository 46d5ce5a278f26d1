"""What teaches and measures the engine, and no part of it: nothing above imports this.

`python -m workshop.NAME` finds NAME in each of the folders below; imports name the folder, too."""

__path__ += [f"{__path__[0]}/{folder}" for folder in ("book", "practice", "watch", "measure")]
