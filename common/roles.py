"""The roles of `LLM(...)`: what they are called by name, and what may stand in place of a name.

    argument            names                           or
    scheduler           SCHEDULERS                      a function of `SchedulerParts`
    policy              chapter 4's own two, or all     a SchedulePolicy
                        of `sglang_policies.POLICIES`
    prefix_cache        PREFIX_CACHES, None             a function of pool, block_size, listener
    chunked_prefill     True, False, a number           a ChunkPolicy
    speculative         PROPOSERS, in a dict            a Proposer
    attention_backend   ATTENTION_BACKENDS, "auto"      an AttentionBackend
    kv_connector        None                            a KVConnector

A name stands in one table. It leads to "module:attribute", which is imported when somebody chooses
it and not before.

A part that may keep state of its engine's requests, as policies and proposers do, is one engine's
for good: `claimed`. A connector sees to that itself, in `bind`. An attention backend may serve
several: what it keeps of a step is in the plan."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, runtime_checkable

from paged_attention import AttentionBackend
from policies import POLICIES, SchedulePolicy, policy_named
from whole_prompts import ChunkPolicy

if TYPE_CHECKING:
    from grammar_queue import GrammarsCompiled
    from proposers import Proposer

SCHEDULERS = {
    # Chapter 4. They fill the memory, and preempt when it runs out.
    "two_phase": "common.scheduler_assembly:make_two_phase",
    "prefill_first": "common.scheduler_assembly:make_prefill_first",
    # Chapter 1, over blocks and a cache. It reserves everything at admission.
    "fcfs": "common.scheduler_assembly:make_fcfs",
}
PREFIX_CACHES = {
    "hash": "common.scheduler_assembly:make_hash_cache",
    "radix": "common.scheduler_assembly:make_radix_cache",
}
PROPOSERS = {"ngram": "common.assembly:make_ngram", "draft": "common.assembly:make_draft_model"}
# Plugins of the runner that are made when the first request brings something for them.
LATE_PLUGINS = {
    "prompt_logprobs": "common.sampling.prompt_logprobs:make",
    "grammar": "common.grammars.grammar_masks:make",
}
# The scheduler's side of grammars, likewise: a `Grammars` of the arguments that the engine gives.
REQUEST_GRAMMARS = "common.grammars.request_grammars:RequestGrammars"
# Where prompts are whole; where they are cut, and a batch has both decodes and chunks.
ATTENTION_BACKENDS = {
    "torch": (
        "paged_attention:TorchAttentionBackend",
        "mixed_attention:MixedAttentionBackend",
    ),
    "triton": (
        "paged_attention_triton:TritonAttentionBackend",
        "mixed_attention_triton:MixedTritonAttentionBackend",
    ),
}


def load(where: str) -> Any:
    """What stands at "module:attribute"."""
    module, _, name = where.partition(":")
    return getattr(import_module(module), name)


@runtime_checkable
class LearnsDurations(Protocol):
    """A `ChunkPolicy` that wants to know what steps take."""

    def observe_step(
        self, starts: Sequence[int], num_tokens: Sequence[int], step_ms: float
    ) -> None: ...


class Grammars(Protocol):
    """The grammars of an engine's requests, as the engine sees them."""

    queue: GrammarsCompiled
    close: Callable[[], object]


# -- what is allowed


def check_scheduler(value: object) -> None:
    _check("scheduler", value, SCHEDULERS, callable(value), "a function of SchedulerParts")


def check_policy(value: Any) -> None:
    if isinstance(value, SchedulePolicy):
        has_key = getattr(value.key, "__func__", None) is not SchedulePolicy.key
        has_order = getattr(value.order, "__func__", None) is not SchedulePolicy.order
        if not has_key and not (has_order and value.looks_at_cache):
            needed = "must define key, or set looks_at_cache and define order"
            raise ValueError(f"policy is {value!r}: its class {needed}")
        return
    if isinstance(value, str) and value in POLICIES:
        return
    import sglang_policies

    policy_named(value, sglang_policies.POLICIES)


def check_prefix_cache(value: object) -> None:
    instead = "a function of pool, block_size and listener that makes a PrefixCache"
    _check("prefix_cache", value, (None, *PREFIX_CACHES), callable(value), instead)


def check_chunked_prefill(value: object) -> None:
    is_size = isinstance(value, int) and (isinstance(value, bool) or value >= 1)
    if not is_size and not _is_made(value, ChunkPolicy):
        raise ValueError(
            f"chunked_prefill is {value!r}: it must be True, False, an integer >= 1 or an "
            "instance of ChunkPolicy"
        )


def check_attention_backend(value: object) -> None:
    names = ("auto", *ATTENTION_BACKENDS)
    is_one = _is_made(value, AttentionBackend)
    _check("attention_backend", value, names, is_one, "an instance of AttentionBackend")


def check_method(value: object) -> None:
    _check("method", value, PROPOSERS, is_proposer(value), "an instance of Proposer")


def is_proposer(value: object) -> TypeGuard[Proposer]:
    if value is None or isinstance(value, str | dict):
        return False
    from proposers import Proposer

    return _is_made(value, Proposer)


def is_own(value: object) -> bool:
    """Is it a part, and no name or number?"""
    return value is not None and not isinstance(value, str | int | float | dict)


def _check(
    field: str, value: object, names: Iterable[str | None], is_one: bool, instead: str
) -> None:
    if value is None or isinstance(value, str):
        is_one = value in tuple(names)
    if not is_one:
        shown = ", ".join(map(repr, names))
        raise ValueError(f"{field} is {value!r}: it must be {instead}, or one of {shown}")


def _is_made(value: object, protocol: type) -> bool:
    """A class is none: its methods want an instance."""
    return not isinstance(value, type) and isinstance(value, protocol)


# -- what belongs to one engine

_claims: dict[int, object] = {}  # by id, which another object may have later


@contextmanager
def claimed(parts: Mapping[str, object]) -> Iterator[None]:
    """These parts, by argument, are one engine's: another one that is given them raises
    `ValueError`. If the engine cannot be made, they are free again."""
    taken: list[object] = []
    try:
        for field, part in parts.items():
            claim(field, part)
            taken.append(part)
        yield
    except BaseException:
        release(taken)
        raise


def release(parts: Iterable[object]) -> None:
    for part in parts:
        _claims.pop(id(part), None)


def claim(field: str, part: object) -> None:
    key = id(part)
    if key in _claims:
        raise ValueError(
            f"{field} is {part!r}: it belongs to another engine; make one for each engine"
        )
    try:
        _claims[key] = weakref.ref(part, lambda _: _claims.pop(key, None))
    except TypeError:  # its class has slots and none for this: it stays
        _claims[key] = part
