"""Questions to a frame (`common/events/frames.py`), and what happened between two of them.

Needs only Python's standard library. The page has the same functions in `page/frames.js`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from common.events.frames import Frame

# -- questions to a frame


def eviction_order(frame: Frame, is_grouped: bool = False) -> list[int]:
    """Cached blocks that no request uses, the next victim first."""
    free, cached = frame["free"], frame["cached"]
    return [block for block in free if str(block) in cached] if is_grouped else frame["evictable"]


def prefix_of(frame: Frame, block: int) -> list[int]:
    """All tokens that a cached block depends on, its own last."""
    parts: list[list[int]] = []
    place: int | None = block
    while place is not None:
        row = frame["cached"][str(place)]
        parts.append(row["tokens"])
        place = row.get("parent")
    return [token for part in reversed(parts) for token in part]


def nodes(frame: Frame) -> list[list[int]]:
    """With a radix tree: the blocks of each node, head first."""
    heads = []
    below = {}
    for block, row in frame["cached"].items():
        if row.get("begins_node"):
            heads.append(int(block))
        else:
            below[row.get("parent")] = int(block)
    found = []
    for head in sorted(heads):
        node = [head]
        while (block := below.get(node[-1])) is not None:
            node.append(block)
        found.append(node)
    return found


def reasons_to_wait(frame: Frame) -> dict[str, str]:
    """Why each waiting request did not run, by the last plan of the frame in which it was made."""
    plan = list(frame["in_flight"].values())[-1]
    stop = plan.get("stop", [""])[0]
    return {name: plan.get("skipped", {}).get(name, stop) for name in frame["waiting"]}


def cells(plan: dict[str, Any], frame: Frame) -> Iterator[tuple[str, str, int, int]]:
    """Split a plan by kinds of tokens: `(request, kind, start, num_tokens)`, where kind is
    "recomputed" (lost by a preemption), "prompt", "decode", or "draft" (a draft token)."""
    drafts, recomputed = plan.get("drafts", {}), plan.get("recomputed", {})
    names = plan.get("requests", ())
    starts = plan.get("starts", ())
    for name, start, num in zip(names, starts, plan.get("num_tokens", ())):
        num_drafts = len(drafts.get(name, ()))
        first = start
        end = start + num - num_drafts
        bounds = recomputed.get(name, 0), len(frame["requests"][name]["prompt"]), end
        for kind, bound in zip(("recomputed", "prompt", "decode"), bounds):
            if (stop := min(max(bound, first), end)) > first:
                yield name, kind, first, stop - first
                first = stop
        if num_drafts:
            yield name, "draft", end, num_drafts


# -- what happened between two frames

Happened = dict[str, Any]


def happened(before: Frame, after: Frame) -> Happened:
    """Return what led from one frame to the next one.

    arrived, finished       ids of requests
    admitted                [id, cached tokens, is it back after a preemption]
    preempted               [id, lost tokens, id of the request that gets its blocks, or None]
    plan                    the plan that was made, with its `step`; None: no plan was made
    result                  of the step that ended; None: no step ended
    tokens                  by id: the output tokens that the step added
    taken, shared, freed    by id: blocks of its table that were allocated for it, that were cached
                            before, and that it no longer holds
    published               by id: blocks that are cached now
    known                   [id, block, the cached block with its content that replaces it]
    evicted, split          blocks that left the cache; blocks that begin a node since
    loads_begun, loads_ended
    """
    plans = [step for step in after["in_flight"] if step not in before["in_flight"]]
    plan = {"step": int(plans[0]), **after["in_flight"][plans[0]]} if plans else None
    result = after["result"] if after["result"] != before["result"] else None
    found = {
        **_requests_that_moved(before, after, plan or {}),
        "plan": plan,
        "result": result,
        "tokens": _new_tokens(before, after) if result else {},
        **_tables_that_changed(before, after),
        **_cache_that_changed(before, after),
        "loads_begun": [name for name in after["loads"] if name not in before["loads"]],
        "loads_ended": [name for name in before["loads"] if name not in after["loads"]],
    }
    return found


def is_other(before: Frame, after: Frame, request_id: str) -> bool:
    """Whether the request of this id is another one than before."""
    rows = (frame["requests"].get(request_id) for frame in (before, after))
    one, other = (None if row is None else row["number"] for row in rows)
    return one != other


def _requests_that_moved(before: Frame, after: Frame, plan: dict[str, Any]) -> Happened:
    rows = after["requests"].items()
    preempted = plan.get("preempted", [])
    was_preempted = {name for name, *_ in preempted}
    return {
        "arrived": [name for name, _ in rows if is_other(before, after, name)],
        "finished": [
            name
            for name, row in rows
            if row.get("finish")
            and (is_other(before, after, name) or not before["requests"][name].get("finish"))
        ],
        "admitted": [
            [name, num, name in was_preempted or bool(_num_preemptions(before, name))]
            for name, num in plan.get("admitted", ())
        ],
        "preempted": preempted,
    }


def _num_preemptions(frame: Frame, request_id: str) -> int:
    row = frame["requests"].get(request_id)
    return 0 if row is None else row["num_preemptions"]


def _new_tokens(before: Frame, after: Frame) -> dict[str, list[int]]:
    found = {}
    for name, ids in after["outputs"].items():
        num = 0 if is_other(before, after, name) else len(before["outputs"][name])
        if len(ids) > num:
            found[name] = ids[num:]
    return found


def _tables_that_changed(before: Frame, after: Frame) -> Happened:
    found: Happened = {"taken": {}, "shared": {}, "freed": {}, "known": []}
    tables = before["tables"], after["tables"]
    for name in {**tables[0], **tables[1]}:
        was, now = (t.get(name, {}) for t in tables)
        if was == now:
            continue
        for group in {**was, **now}:
            old, new = was.get(group, []), now.get(group, [])
            replaced = {b: a for a, b in zip(old, new) if a != b and a and b}
            found["known"] += [[name, a, b] for b, a in replaced.items()]
            held, holding = set(old), set(new)
            added = [b for b in new if b and b not in held and b not in replaced]
            is_shared = lambda b: before["cached"].get(str(b)) == after["cached"].get(str(b), 0)  # noqa: E731
            for kind, blocks in (
                ("taken", [b for b in added if not is_shared(b)]),
                ("shared", [b for b in added if is_shared(b)]),
                ("freed", [b for b in old if b and b not in holding | set(replaced.values())]),
            ):
                if blocks:
                    found[kind].setdefault(name, []).extend(blocks)
    return found


def _cache_that_changed(before: Frame, after: Frame) -> Happened:
    published: dict[str, list[int]] = {}
    was, now = before["cached"], after["cached"]
    evicted = [int(block) for block in was if block not in now]
    split = []
    for block, row in now.items():
        old = was.get(block)
        if old is row or old == row:
            continue
        if old is not None and row == {**old, "begins_node": True}:
            split.append(int(block))
            continue
        if old is not None:
            evicted.append(int(block))
        published.setdefault(row.get("by", ""), []).append(int(block))
    for name, blocks in published.items():
        tables = before["tables"].get(name, {}).values()
        _sort_as(blocks, [block for ids in tables for block in ids])
    if evicted:
        _sort_as(evicted, before["evictable"])
    return {"published": published, "evicted": evicted, "split": sorted(split)}


def _sort_as(blocks: list[int], order: list[int]) -> None:
    """Sort blocks in place as they are in `order`; others come last, by id."""
    place = {block: index for index, block in enumerate(order)}
    blocks.sort(key=lambda block: (place.get(block, len(order)), block))
