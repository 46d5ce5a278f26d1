"""Every way to attend to a group, in both groupings, with every window, by chapter 2's contract:
NaN in all that no query sees. Rows go to the plain `attend_rows`, which needs no compiler."""

from __future__ import annotations

from typing import Any

import pytest

import invariant_attention
import mixed_attention
import paged_attention
from invariant_attention import InvariantAttentionBackend
from test_compiled_attention import Compiled
from test_mixed_attention import Mixed
from test_paged_attention import BATCHES, WINDOWS, Attention, Case
from test_window_attention import GivesUp


class CompiledMixed(Compiled):
    """Beside mixed attention, with the metadata of a mixed batch."""

    def make_backend(self, case: Case, others: Any = None):
        return super().make_backend(case, Mixed().make_backend(case))


class Invariant(Attention):
    def make_backend(self, case: Case) -> InvariantAttentionBackend:
        return InvariantAttentionBackend()


KINDS = {"mixed": Mixed(), "compiled, mixed": CompiledMixed(), "invariant": Invariant()}
SOME = [*WINDOWS, "blocks of 4, edges"]  # all: next to each backend


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(paged_attention, "QUERY_TILE", 7)
    monkeypatch.setattr(mixed_attention, "KEY_TILE", 16)
    monkeypatch.setattr(mixed_attention, "QUERY_TILE", 16)
    monkeypatch.setattr(invariant_attention, "KEY_TILE", 4)
    monkeypatch.setattr(invariant_attention, "CHUNK_ROWS", 8)


@pytest.mark.net
@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind in KINDS for name in (BATCHES if kind == "invariant" else SOME)],
)
def test_every_query_sees_what_it_should(name, kind):
    """In layers that see everything and in those with a window, whose earlier blocks are given up.
    For invariant attention: spans in which some rows see nothing, and chunks that begin after the
    first one."""
    GivesUp(KINDS[kind]).check(**BATCHES[name])
