"""Attention without a host, by chapter 2's contract."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tensor_attention import TensorAttentionBackend
from test_paged_attention import (  # noqa: F401  the contract, with `attention`
    Attention,
    test_each_query_attends_to_what_it_sees,
    test_written_tokens_stand_in_their_slots_and_nothing_else_changes,
)


class Tensors(Attention):
    def make_case(self, lengths, block_size, **options):
        """Decodes; numbers on the host are unusable."""
        decodes = [(min(query_len, 1), seq_len) for query_len, seq_len in lengths]
        case = super().make_case(decodes or [(0, 1)], block_size, **options)
        unknown = {"max_query_len": "unknown", "max_seq_len": "unknown"}
        return replace(case, metadata=replace(case.metadata, **unknown))

    def make_backend(self, case):
        return TensorAttentionBackend()


@pytest.fixture
def attention() -> Attention:
    return Tensors()
