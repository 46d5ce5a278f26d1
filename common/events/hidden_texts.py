"""Hide texts in events for a viewer that may read only some of the requests.

The other requests keep their lengths: each token id becomes -1, and each text empty. Their names,
blocks and counters stay too, so the events still rebuild the engine's state. Block hashes are
hidden as well, because a hash can confirm a suspected content, and the labels that a client can
choose are hidden too: tenant, order key, adapter, grammar, stop string."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

HIDDEN = -1
_IDS = ("prompt", "outputs")
_TEXTS: dict[str, Any] = {
    **{name: [] for name in ("pieces", "prompt_pieces", "hashes")},
    **dict.fromkeys(["tenant", "order_key", "adapter", "grammar", "rest", "stop_string"], ""),
    "stop_reason": None,
}
# Fields by request: token ids, and the text that they add.
_IDS_OF_EACH, _TEXTS_OF_EACH = ("tokens", "drafts", "discarded"), "pieces"


def hide_texts(event: dict[str, Any], may_read: Callable[[str], bool]) -> dict[str, Any]:
    """Return `event`, one line of a run, without the texts of requests that `may_read` denies."""
    kind = event["kind"]
    if kind == "snapshot":
        return _hide_in_snapshot(event, may_read)
    if kind in ("planned", "computed"):
        return _hide_of_each(event, may_read)
    if kind == "failed":  # the message of an exception may quote any request of the step
        return event | {"error": event["error"].partition(":")[0]}
    return _hide_in_row(event, may_read)


def _hide_in_row(row: dict[str, Any], may_read: Callable[[str], bool]) -> dict[str, Any]:
    request = row.get("request")
    if request is None or may_read(request):
        return row
    ids = {name: [HIDDEN] * len(row[name]) for name in _IDS if name in row}
    return row | ids | {name: empty for name, empty in _TEXTS.items() if name in row}


def _hide_of_each(event: dict[str, Any], may_read: Callable[[str], bool]) -> dict[str, Any]:
    shown = dict(event)
    for name in (name for name in _IDS_OF_EACH if name in event):
        shown[name] = {
            request: ids if may_read(request) else [HIDDEN] * len(ids)
            for request, ids in event[name].items()
        }
    if _TEXTS_OF_EACH in event:
        pieces = event[_TEXTS_OF_EACH].items()
        shown[_TEXTS_OF_EACH] = {request: texts for request, texts in pieces if may_read(request)}
    return shown


def _hide_in_snapshot(event: dict[str, Any], may_read: Callable[[str], bool]) -> dict[str, Any]:
    """Hide the texts of a snapshot. A cached block is shown if a request that may be read has it in
    its table, because the block's tokens are then some of that request's."""
    rows, shown = event["requests"], dict(event)
    tables = [
        table
        for row in rows
        if may_read(row["request"])
        for table in (row["table"], *row.get("tables", ()))
    ]
    known = {block for table in tables for block in table}
    hidden: dict[str, Any] = {"tenant": "", "hash": ""}
    shown["requests"] = [_hide_in_row(row, may_read) for row in rows]
    shown["cached"] = [
        row if row["block"] in known else row | hidden | {"tokens": [HIDDEN] * len(row["tokens"])}
        for row in event.get("cached", ())
    ]
    plans = event.get("under_way", ())
    shown["under_way"] = [_hide_of_each(plan, may_read) for plan in plans]
    return shown
