"""Hide texts in frames for a viewer that may read only some of the requests.

The other requests keep their lengths: each token id becomes -1, and each text empty. Their names,
blocks and counters stay too, so the frames still lead to the engine's state. Block hashes are
hidden as well, because a hash can confirm a suspected content, and the labels that a client can
choose are hidden too: tenant, order key, adapter, grammar, stop string.

See common/serve/README.md#seen-live"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

HIDDEN = -1
_LABELS = ("tenant", "order_key", "adapter", "grammar", "hash")
_TEXTS = ("prompt", "prompt_pieces", "tokens", "rest", "stop_reason")


def hide_texts(line: dict[str, Any], may_read: Callable[[str], bool]) -> dict[str, Any]:
    """Return `line`, one line of a run, without the texts of requests that `may_read` denies."""
    if "changes" not in line:
        return line
    changes = dict(line["changes"])
    for name in ("outputs", "pieces"):
        _each(changes, name, lambda request, ids: ids if may_read(request) else masked(ids))
    _each(changes, "requests", lambda request, row: row if may_read(request) else _hidden(row))
    known = _blocks_of(changes.get("tables", {}), may_read) if line["at"] == "start" else set()
    is_known = lambda block, row: block in known or _is_published(row, may_read)  # noqa: E731
    _each(changes, "cached", lambda block, row: row if is_known(block, row) else _hidden(row))
    _each(changes, "in_flight", lambda _, plan: plan and [_hide_by_request(plan[0], may_read)])
    if "result" in changes and changes["result"][0] is not None:
        changes["result"] = [_hide_by_request(changes["result"][0], may_read)]
    return line | {"changes": changes}


def masked(value: Any) -> Any:
    """Replace all ids and texts in lists."""
    if isinstance(value, list):
        return [masked(item) for item in value]
    if isinstance(value, str):
        return ""
    return value if value is None else HIDDEN


def _each(changes: dict[str, Any], name: str, hide: Callable[[str, Any], Any]) -> None:
    if name in changes:
        changes[name] = {key: hide(key, change) for key, change in changes[name].items()}


def _hidden(change: Any) -> Any:
    """Hide the texts in the difference of a row."""
    if isinstance(change, list):
        return [_hidden(value) for value in change]
    if not isinstance(change, dict):
        return change
    shown = {name: _hidden(value) for name, value in change.items()}
    shown |= {name: masked(shown[name]) for name in _TEXTS if name in shown}
    return shown | {name: masked(shown[name]) for name in _LABELS if name in shown}


def _is_published(row: Any, may_read: Callable[[str], bool]) -> bool:
    """Whether a block was published now by a request that may be read."""
    return isinstance(row, list) and bool(row[0].get("by")) and may_read(row[0]["by"])


def _blocks_of(tables: dict[str, Any], may_read: Callable[[str], bool]) -> set[str]:
    """The blocks in tables of requests that may be read. Their tokens are some of theirs."""
    shown = [change[0] for name, change in tables.items() if may_read(name)]
    return {str(block) for groups in shown for ids in groups.values() for block in ids}


def _hide_by_request(facts: dict[str, Any], may_read: Callable[[str], bool]) -> dict[str, Any]:
    shown = dict(facts)
    for name in ("drafts", "discarded"):
        if name in shown:
            shown[name] = {
                request: ids if may_read(request) else masked(ids)
                for request, ids in shown[name].items()
            }
    if "error" in shown:  # the message of an exception may quote any request of the step
        shown["error"] = shown["error"].partition(":")[0]
    return shown
