"""What an engine finds by name while it runs, and which parts are one engine's.

What `LLM(...)` takes by name stands in the tables of `engine_config.py`. A part that may keep state
of its engine's requests, as policies and proposers do, is one engine's for good: `claim_exclusive`.
A connector sees to that itself, in `bind`. An attention backend may serve several: what it keeps of
a step is in the plan."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from grammar_queue import GrammarsCompiled

# Plugins of the runner that are made when the first request brings something for them.
LAZY_PLUGINS = {
    "prompt_logprobs": "common.sampling.prompt_logprobs:make",
    "grammar": "common.features.grammars.grammar_masks:make",
}
# The scheduler's side of grammars, likewise: a `Grammars` of the arguments that the engine gives.
REQUEST_GRAMMARS = "common.features.grammars.request_grammars:RequestGrammars"


class Grammars(Protocol):
    """The grammars of an engine's requests, as the engine sees them."""

    queue: GrammarsCompiled
    close: Callable[[], object]


# -- what belongs to one engine

_claims: dict[int, object] = {}  # by id, which another object may have later


@contextmanager
def claim_exclusive(parts: Mapping[str, object]) -> Iterator[None]:
    """These parts, by argument, are one engine's: another one that is given them raises
    `ValueError`. If the engine cannot be made, they are free again."""
    taken: list[object] = []
    try:
        for field, part in parts.items():
            claim_one(field, part)
            taken.append(part)
        yield
    except BaseException:
        release(taken)
        raise


def release(parts: Iterable[object]) -> None:
    for part in parts:
        _claims.pop(id(part), None)


def claim_one(field: str, part: object) -> None:
    key = id(part)
    if key in _claims:
        raise ValueError(
            f"{field} must belong to this engine, got {part!r}; make one for each engine"
        )
    try:
        _claims[key] = weakref.ref(part, lambda _: _claims.pop(key, None))
    except TypeError:  # its class has slots and none for this: it stays
        _claims[key] = part
