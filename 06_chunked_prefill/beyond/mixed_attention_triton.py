"""`mixed_attention` as Triton kernels: decodes and chunks in two launches. Version 2.

Version 1 is chapter 2's (`paged_attention_triton.py`). It chooses one tile for the whole batch.
Next to a chunk of 512 tokens, a decode then gets a tile of 64 rows, of which two are its own when
two heads share a KV head: 97 % padding, in each of 256 decodes. And keys are split by one rule,
though decodes want many short splits and chunks few long ones.

Here `AttentionMetadata.num_short` is the border between two launches of the same kernel:

    sequences          | B | C | D d d |      E: chunk of 4 | A: chunk of 6       |
    launch             short: 16 rows a tile  long: 64 rows a tile
    splits of keys     256 keys each          only if there are few tiles
    work items         exactly counted: the host knows the lengths of a mixed batch

The price: the second launch begins when the first one has ended, and the last programs of the first
leave multiprocessors idle. A batch of decodes only, or of chunks only, is one launch.

What version 1 saw of a batch, version 2 sees of each side: plan, kernels and merging are the same.
Invariant: on which side of the border a sequence stands is a matter of speed only.

Sources: vLLM's FlashInfer backend calls one kernel for decodes and one for prefills, in this order;
its Triton backend has one launch for both.

See 02_paged_kv/beyond/README.md#the-kernels-in-versions"""

from __future__ import annotations

from itertools import pairwise

from paged_attention import AttentionMetadata
from paged_attention_triton import (
    SHORT_ROWS,
    SequenceRange,
    TritonAttentionBackend,
    TritonPlan,
)


class MixedTritonPlan(TritonPlan):
    """Chapter 2's plan, with a launch for each side of the border and exact counts. Plain metadata
    has no border, and is planned as in chapter 2."""

    def launches(self, metadata: AttentionMetadata) -> list[SequenceRange]:
        if not metadata.query_starts:
            return super().launches(metadata)
        query_lens = [stop - start for start, stop in pairwise(metadata.query_starts)]
        num_short = metadata.num_short
        if num_short is None:  # sequences at the front whose queries fit the smallest tile
            max_query_len = SHORT_ROWS // self.shape.num_shared
            num_short = next(
                (i for i, n in enumerate(query_lens) if n > max_query_len), len(query_lens)
            )
        lens = list(zip(query_lens, metadata.host_seq_lens, strict=True))
        return [
            SequenceRange(
                first_seq=first,
                num_seqs=last - first,
                first_token=metadata.query_starts[first],
                num_tokens=metadata.query_starts[last] - metadata.query_starts[first],
                max_query_len=max(query_lens[first:last]),
                max_seq_len=max(metadata.host_seq_lens[first:last]),
                lens=lens[first:last],
            )
            for first, last in ((0, num_short), (num_short, len(query_lens)))
            if first < last
        ]


class MixedTritonAttentionBackend(TritonAttentionBackend):
    """An `AttentionBackend` for mixed batches; writing and all checks are chapter 2's."""

    plan_type = MixedTritonPlan
