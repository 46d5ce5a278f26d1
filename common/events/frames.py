"""Frames: the engine's state after planning a step and after its results, as plain JSON, and the
difference between two of them.

    changes = diff(before, after)
    apply(before, changes) == after

A difference is a JSON value, too:

    null                   the key has left a dict
    [value]                the new value
    [[removed], [added]]   a list lost these items, wherever they were, and got these at its end
    {key: difference}      a dict changed at these keys

The recorder (`frame_recorder.py`) reads the whole engine at each moment (`engine_frame.py`) and
writes the difference.

A frame, with every id of a block as a string where it is a key:

    waiting, running    ids of requests, in order of service and of admission
    requests            by id: what a request is, and how it has ended (`finish`)
    computed            by id: positions with KV, planned ones included
    outputs, pieces     by id: output tokens, and the text that each adds
    tables              by id: block tables by group of layers; 0 is an entry that was released
    free, refs          free blocks, the next to be allocated first; references of the others
    cached, evictable   by block: its content; cached blocks without a user, the next victim first
    loads, loaded       KV that is being loaded, by request; blocks that tiers have loaded, by tier
    in_flight           plans without results, the oldest first
    result              of the step that ended last

An ended request stays in the frame in which it ended and is removed in the next one.

See common/events/README.md#the-format-version-2"""

from __future__ import annotations

from typing import Any

VERSION = 2  # raised by a change that an old reader would misunderstand
MOMENTS = ("start", "between", "plan", "result", "failed")

# Why a waiting request did not run. A skipped request has a separate reason; all requests after
# the one at which admission stopped share its reason.
REASONS = {
    "budget": "the tokens of this step were spent",
    "blocks": "too few KV blocks were free, or those left are kept for running requests",
    "preempting": "a step that preempts admits none",
    "seat": "every batch slot is taken (max_num_seqs)",
    "constraint": "a rule held it back: a static batch, too many long prompts, an adapter",
    "parent": "another request is computing the block that it could share",
    "remote_kv": "its KV is on its way from a tier or a store",
    "grammar": "its grammar is being compiled",
    "pending": "a token of it was still in flight when it was preempted",
    "turn": "this step was for decoding requests",
    "enough": "so many requests were skipped before it that no other was tried",
    "front": "first come, first served: the request at the front did not fit or was held back",
}

Frame = dict[str, Any]


def diff(before: Any, after: Any) -> Any:
    """Return the difference, `{}` if there is none. A list with repeated items, or with items that
    are not plain values, is either extended or replaced."""
    if isinstance(before, dict) and isinstance(after, dict):
        changed = {
            key: diff(before[key], value) if key in before else [value]
            for key, value in after.items()
            if key not in before or (before[key] is not value and before[key] != value)
        }
        return changed | {key: None for key in before if key not in after}
    if isinstance(before, list) and isinstance(after, list):
        if after[: len(before)] == before:
            return [[], after[len(before) :]]
        num_kept = _num_kept(before, after)
        if num_kept > 0 or num_kept == len(after):  # so that the last items go as those before them
            kept = set(after[:num_kept])
            return [[item for item in before if item not in kept], after[num_kept:]]
    return [after]


def _num_kept(before: list[Any], after: list[Any]) -> int:
    """Return how many items at the front of `after` are in `before` in this order; -1 if an item
    repeats or is a container."""
    try:
        if len(set(before)) < len(before) or len(set(after)) < len(after):
            return -1
    except TypeError:  # of a container
        return -1
    place = 0
    for num_kept, item in enumerate(after):
        try:
            place = before.index(item, place) + 1
        except ValueError:  # new, or moved towards the end
            return num_kept
    return len(after)


def apply(before: Any, changes: Any) -> Any:
    """Return the value after the difference. `before` is not changed."""
    if isinstance(changes, dict):
        after = {key: value for key, value in before.items() if changes.get(key, 0) is not None}
        for key, change in changes.items():
            if change is not None:
                after[key] = apply(before.get(key), change)
        return after
    if len(changes) == 1:
        return changes[0]
    removed, added = changes
    removed = set(removed)
    return [item for item in before if item not in removed] + added if removed else before + added


BY_REQUEST = ("requests", "computed", "outputs", "pieces")


def empty_frame(num_blocks: int) -> Frame:
    """The frame of an engine that has not served a request."""
    frame: Frame = {name: {} for name in (*BY_REQUEST, "tables", "refs", "cached", "in_flight")}
    frame |= {"waiting": [], "running": [], "evictable": [], "loads": {}, "loaded": {}}
    return frame | {"free": list(range(1, num_blocks)), "result": None}
