"""Code that teaches and measures the engine but is not part of it: the engine imports none of this.

`python -m workshop.NAME` finds NAME in each of the folders below; imports name the folder, too."""

__path__ += [
    f"{__path__[0]}/{folder}" for folder in ("book", "practice", "watch", "measure", "site")
]
