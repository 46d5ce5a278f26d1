"""The parts that an engine finds by name while it runs, and the claims of parts for one engine.

The names that `LLM(...)` takes are in the tables of `engine_config.py`. A part that can keep state
of its engine's requests, as policies and proposers do, belongs to one engine for its lifetime:
`claim_exclusive`. A connector checks that itself, in `bind`. An attention backend can serve several
engines, because its state of a step is in the plan."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from grammar_queue import GrammarsCompiled

# Plugins of the runner that are made when the first request has the feature.
LAZY_PLUGINS = {
    "prompt_logprobs": "common.sampling.prompt_logprobs:make",
    "grammar": "common.features.grammars.grammar_masks:make",
}
# The scheduler's side of grammars, made likewise: a `Grammars`, from the engine's arguments.
REQUEST_GRAMMARS = "common.features.grammars.request_grammars:RequestGrammars"


class Grammars(Protocol):
    """The grammars of an engine's requests, as the engine sees them."""

    queue: GrammarsCompiled
    close: Callable[[], object]


# -- parts that belong to one engine

_claims: dict[int, object] = {}  # by id, which is reused after an object is collected


@contextmanager
def claim_exclusive(parts: Mapping[str, object]) -> Iterator[None]:
    """Claim these parts (by argument name) for one engine. Raises `ValueError` if another engine
    has one of them. If the engine cannot be made, the parts are released."""
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
    except TypeError:  # its class has no `__weakref__` slot, so it is kept
        _claims[key] = part
