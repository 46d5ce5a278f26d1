"""Small functions that use a module of a task as a caller would, and yield the result in a few
lines: see `exercise.py`. A task whose tests or film show that already has none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Lines = Iterator[str]


def rectangles() -> Lines:
    from input_batch import InputBatch

    batch = InputBatch(["old", "new"], [[12], [6, 99, 8]], [3, 0])
    for time in ("first", "second"):
        ids, mask, positions = batch.to_tensors("cpu", pad_token_id=99)
        yield f"{time} call: ids {ids.tolist()}"
        yield f"   mask {mask.tolist()}, positions {positions.tolist()}"
    shapes = [tuple(t.shape) for t in InputBatch([], [], []).to_tensors("cpu")]
    yield f"all of {ids.dtype}, {mask.dtype}, {positions.dtype}; of no requests {shapes}"


def slots() -> Lines:
    from block_pool import BlockPool
    from kv_cache_manager import BlockTable, KVCacheManager

    manager = KVCacheManager(BlockPool(9), block_size=4)
    table = manager._tables["r"] = BlockTable()
    table.append(manager.pool.blocks[block_id] for block_id in (7, 2, 5))
    yield "blocks of 4, table [7, 2, 5]"
    for start, stop in ((5, 10), (0, 12), (11, 13), (-1, 1), (6, 3)):
        try:
            shown = str(manager.slot_mapping("r", start, stop))
        except ValueError:
            shown = "refused"
        yield f"positions [{start}, {stop}): {shown}"


def chains() -> Lines:
    from prefix_cache_local import compute_block_hash, compute_hash_chain

    tokens = list(range(14))
    chain = compute_hash_chain(tokens, 4)
    other = compute_hash_chain([9, *tokens[1:]], 4)
    salted = compute_hash_chain(tokens, 4, [("salt", "x")])
    first = compute_block_hash(None, tokens[:4])
    behind = compute_block_hash(salted[0][0], tokens[4:8])
    third = compute_block_hash(chain[1][0], tokens[8:12])
    yield (
        f"14 tokens in blocks of 4: {[list(tokens) for _, tokens in chain]}\n"
        f"8 tokens in blocks of 4: {len(compute_hash_chain(tokens[:8], 4))} blocks\n"
        f"the first hash is that of its block: {chain[0][0] == first}\n"
        f"another first token, the second hash differs: {chain[1][0] != other[1][0]}\n"
        f"with a salt, the first hash differs: {chain[0][0] != salted[0][0]}\n"
        f"the second is the hash after the first: {salted[1][0] == behind}\n"
        f"the third is the hash after the second: {chain[2][0] == third}"
    )


def cuts() -> Lines:
    from block_pool import Block
    from radix_tree import RadixTree

    tree = RadixTree(page_size=2)
    blocks = [Block(block_id, 2) for block_id in (1, 2, 3)]
    root = tree.root(())
    node = tree.append(root, [10, 11, 20, 21, 30, 31], blocks, lock_ref=1)
    node.last_access = 5
    upper = tree.split_node(node, 1)
    names = {id(upper): "upper", id(node): "lower", id(root): "root"}
    yield "three pages of 2 tokens, one user; cut behind the first"
    for name, part in (("upper", upper), ("lower", node)):
        ids = [block.block_id for block in part.blocks]
        below = [names[id(child)] for child in part.children.values()]
        yield (
            f"{name}: tokens {part.key}, blocks {ids}, pages {part.start} to {part.end - 1}, "
            f"{part.lock_ref} users, last used {part.last_access}, below {names[id(part.parent)]}, "
            f"above {below}"
        )
    yield f"blocks are in {[names[id(tree.node_of[n])] for n in (1, 2, 3)]}"


def longest_hits() -> Lines:
    from block_pool import BlockPool
    from grouped_prefix_cache import GroupedPrefixCache
    from prefix_cache_local import compute_hash_chain

    windows = (None, 10, 6, 1)
    chain = compute_hash_chain(list(range(16)), 4)
    yield "4 blocks of 4 tokens, x is there; blocks of the longest prefix that holds"
    for there in ("xxxx", "xxx-", "x-xx", "xx-x", "-xxx", "-x-x", "x---"):
        cache = GroupedPrefixCache(BlockPool(17), 4, windows)
        blocks = iter(cache.pool.blocks[1:])
        for group in range(len(windows)):
            for index, mark in enumerate(there if group else there[::-1]):
                if mark == "x":
                    cache.publish(group, chain, index, next(blocks))
        hashes = [name for name, _ in chain]
        everything, *others = (cache._longest_in(group, hashes) for group in range(len(windows)))
        yield (
            f"{there[::-1]}, all is seen: {everything}    {there}, windows of 10, 6 and 1: {others}"
        )


def allowed_tokens() -> Lines:
    import torch

    from common.sampling.sampling_constraints import forbid

    bits = torch.tensor([[0b10110, 1], [-(2**31), 0]], dtype=torch.int32)
    yield "row 2 may have tokens 1, 2, 4 and 32; row 0 token 31; row 1 has no grammar"
    for vocab_size in (34, 70):
        logits = torch.arange(-3.0, 3 * vocab_size - 3).view(3, vocab_size)
        given = logits.clone()
        changed = forbid(logits, torch.tensor([2, 0]), bits)
        for row in range(3):
            left = torch.isfinite(changed[row]).nonzero().flatten().tolist()
            shown = left if len(left) < 9 else f"{len(left)} of them"
            kept = bool((changed[row, left] == given[row, left]).all())
            yield f"{vocab_size} tokens, row {row}: left {shown}, as they were: {kept}"
        yield f"the logits that were given are as they were: {torch.equal(logits, given)}"


def judged_rows() -> Lines:
    from spec_decode import SimpleLM, verify_and_sample

    model = SimpleLM(50, seed=3)
    said: list[int] = []
    for _ in range(4):
        said.append(int(model.get_logits([1, 2, 3, *said])[-1].argmax()))
    yield f"after 1, 2, 3 the target says {said}"
    for drafts in (said[:3], [said[0], 49, said[2]], []):
        tokens, num_accepted = verify_and_sample(model, [1, 2, 3], drafts, temperature=0)
        yield f"drafts {drafts}: {num_accepted} accepted, tokens {tokens}"


def _sampled(p: list[list[float]], drafts: list[int], q: Any, accept: list[float], u: float) -> str:
    import torch

    from rejection_sampler import rejection_sample

    verified = rejection_sample(
        torch.tensor(p, dtype=torch.float64),
        torch.tensor(drafts),
        None if q is None else torch.tensor(q, dtype=torch.float64),
        torch.tensor([0, len(drafts) + 1]),
        len(drafts),
        torch.tensor(accept, dtype=torch.float64),
        torch.full((len(p),), u, dtype=torch.float64),
    )
    (tokens,), (number,) = verified.token_ids.tolist(), verified.num_sampled.tolist()
    return f"{number - 1} accepted, tokens {tokens[:number]}"


def accepted() -> Lines:
    p = [[0.6, 0.4, 0.0], [0.1, 0.4, 0.5], [0.2, 0.2, 0.6]]
    q = [[0.8, 0.1, 0.1], [0.3, 0.3, 0.4]]
    yield f"p (of the target) {p}"
    yield f"q (of the draft) {q}"
    for drafts, u in (([0, 1], 0.7), ([0, 1], 0.8), ([1, 1], 0.99), ([2, 1], 0.0)):
        shown = _sampled(p, drafts, q, [u, u], 0.9)
        yield f"drafts {drafts}, random number {u}: {shown}"


def residuals() -> Lines:
    p = [[0.5, 0.3, 0.2], [0.0, 0.0, 1.0]]
    yield "p [0.5, 0.3, 0.2], draft 0 is rejected"
    for name, q in (("q [0.8, 0.1, 0.1]", [[0.8, 0.1, 0.1]]), ("a draft that was certain", None)):
        for u in (0.0, 0.6, 0.82):
            yield f"{name}, random number {u}: {_sampled(p, [0], q, [0.99], u)}"


def masks() -> Lines:
    import numpy as np
    import torch

    from attention_plan import DecodeGroup

    keys = torch.zeros(4, 4, 1, 2)
    tables = torch.tensor([[1, 2], [3, 0]])
    rows, starts, seq_lens = map(np.array, ([0, 1], [0, 3, 4], [6, 4]))
    group = DecodeGroup(rows, starts, seq_lens, tables, 1, keys)
    yield f"rows of the query: {group.tokens.tolist()}"
    if group.mask is None:
        yield "no mask"
        return
    for name, mask in zip(("6 keys, 3 queries", "4 keys, 1 query"), group.mask[:, 0]):
        yield name + ":"
        yield from ("  " + " ".join("x" if seen else "." for seen in row) for row in mask == 0)


def merged() -> Lines:
    import torch

    from mixed_attention import Partial

    def part(scores: torch.Tensor, values: torch.Tensor) -> Partial:
        lse = scores.logsumexp(-1, keepdim=True)
        return Partial((scores - lse).exp() @ values, lse)

    values = torch.tensor([[1.0], [2.0], [5.0]]).double()
    for shown in ([0.0, 0.0, 0.0], [1.0, 2.0, 4.0], [800.0, 801.0, 799.0]):
        scores = torch.tensor([shown]).double()
        both = part(scores[:, :2], values[:2])
        both.merge(part(scores[:, 2:], values[2:]))
        whole = part(scores, values)
        yield (
            f"scores {shown}: {both.output.item():.4f} (at once {whole.output.item():.4f}), "
            f"log-sum-exp {both.lse.item():.4f}"
        )
