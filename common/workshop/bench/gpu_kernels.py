"""Every Triton kernel of this book, for the GPU report: the registry.

A group is one kernel, or several versions that compute the same and are timed in turn on the same
inputs:

    check(lab)        what it gave and what it should have given, on fresh inputs, in every dtype
    cells(sizes)      where it is timed, the most telling first
    make(lab, cell)   what is timed there, by version: a call and its `Cost`

A new kernel is a line here and these three functions. Numbers are compared with float64; tokens,
which are integers, must be those of the PyTorch version."""

from __future__ import annotations

from collections.abc import Iterator

from common.workshop.bench.gpu_attention import (
    attention_works,
    cache_bytes,
    check_attention,
    describe_batch,
    merge_works,
    mixed_cells,
    mixed_lengths,
    split_cells,
)
from common.workshop.bench.gpu_inputs import Lab, decode_lengths
from common.workshop.bench.gpu_layer import (
    add_rms_norm_works,
    check_add_rms_norm,
    check_rotate_and_write,
    check_silu_and_multiply,
    check_write_kv,
    rotate_and_write_works,
    row_cells,
    silu_and_multiply_works,
    write_kv_works,
)
from common.workshop.bench.gpu_sampling import COVERS, check_sampling, logits_bytes, sampling_works
from common.workshop.bench.gpu_verification import (
    check_matching,
    check_rejection,
    matching_works,
    probs_bytes,
    rejection_works,
    request_cells,
)
from common.workshop.bench.gpu_work import Comparison, KernelGroup


def check_nothing(lab: Lab) -> Iterator[Comparison]:
    """Its numbers are those of attention of many splits, which is checked."""
    yield from ()


ATTENTION = ("_paged_attention_kernel", "_split_attention_kernel", "_merge_splits_kernel")
GROUPS = [
    KernelGroup(
        "decode attention",
        ATTENTION,
        check_attention,
        lambda sizes: sizes.decode_cells,
        lambda lab, cell: attention_works(lab, decode_lengths(cell)),
        lambda lab, cell: cache_bytes(lab, decode_lengths(cell)),
    ),
    KernelGroup(
        "attention with chunks",
        ATTENTION,
        check_nothing,
        mixed_cells,
        lambda lab, cell: attention_works(lab, mixed_lengths(lab.sizes, cell)),
        lambda lab, cell: cache_bytes(lab, mixed_lengths(lab.sizes, cell)),
        lambda sizes, cell: describe_batch(mixed_lengths(sizes, cell)),
    ),
    KernelGroup(
        "merging",
        ("_merge_splits_kernel",),
        check_nothing,
        split_cells,
        merge_works,
        lambda lab, cell: cache_bytes(lab, decode_lengths(cell)),
    ),
    KernelGroup("write_kv", ("_write_kv_kernel",), check_write_kv, row_cells, write_kv_works),
    KernelGroup(
        "add_rms_norm", ("_add_rms_norm_kernel",), check_add_rms_norm, row_cells, add_rms_norm_works
    ),
    KernelGroup(
        "rotate_and_write",
        ("_rotate_and_write_kernel",),
        check_rotate_and_write,
        row_cells,
        rotate_and_write_works,
    ),
    KernelGroup(
        "silu_and_multiply",
        ("_silu_and_multiply_kernel",),
        check_silu_and_multiply,
        row_cells,
        silu_and_multiply_works,
    ),
    KernelGroup(
        "rejection",
        ("_rejection_kernel",),
        check_rejection,
        request_cells,
        rejection_works,
        probs_bytes,
    ),
    KernelGroup("matching", ("_matching_kernel",), check_matching, request_cells, matching_works),
    KernelGroup("sampling", COVERS, check_sampling, request_cells, sampling_works, logits_bytes),
]
