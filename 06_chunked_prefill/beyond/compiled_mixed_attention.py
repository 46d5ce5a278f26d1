"""Chapter 6's mixed batches with compiled rows.

Decodes, and draft tokens that are to be verified, come first and go to the compiled
function of chapter 2's `decode_attention.py`, those with too many keys for a group too: it reads
them where they lie. Chunks are attended to as in `mixed_attention.py`.
"""

from __future__ import annotations

from compiled_attention import CompiledAttentionBackend, CompiledPlan
from mixed_attention import MixedPlan


class CompiledMixedPlan(CompiledPlan, MixedPlan):
    """A `MixedPlan` whose short queries are computed in machine code."""


class CompiledMixedAttentionBackend(CompiledAttentionBackend):
    plan_type = CompiledMixedPlan
