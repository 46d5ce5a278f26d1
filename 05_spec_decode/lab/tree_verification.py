"""A tree of drafts: several guesses for the same place, judged in one pass.

A chain dies with its first wrong draft. A tree has second choices, and choices behind those:

    context  --+-- 0 the --+-- 3 cat                  node  parent  depth
               |           '-- 4 dog                  0     -1      0     a child of the context
               +-- 1 a ------- 5 cat                  3      0      1
               '-- 2 my                               5      1      1

All nodes are fed behind the context. A node's *position* is its depth, since siblings are rivals
for one place, and it sees the context, its ancestors and itself:

            context   0  1  2  3  4  5
    0 the      x      x
    1 a        x         x
    2 my       x            x
    3 cat      x      x        x
    4 dog      x      x           x
    5 cat      x         x           x      so "cat" behind "a" is judged as "... a cat"

So each node's row of logits is the one that a plain pass over its path would give. From the root,
the walk goes on to a child that the target agrees with; the longest such path is accepted, and the
target's own token follows. In an engine the path's KV, which is scattered, must then be moved
together (`num_accepted` slots), and the KV of all other nodes is given back.

What it brings: a chain of k drafts, each right with chance a, brings a + a^2 + ... + a^k tokens;
longer chains soon bring nothing more. With b guesses for a place, a is the chance that one of them
is right: a tree raises a itself. What it costs: the pass computes all nodes, though at most one for
each depth counts; (3, 2, 1) judges 15 nodes for at most 3 of them. That is free while passes wait
for weights, so for few requests; a full batch pays for every node, and there a chain, or nothing,
is better.

`verify_tree_greedy` serves temperature 0. Above it, `verify_tree_sampled` is exact as well: the
siblings of a node are drawn without replacement and tried in turn by the rejection rule, what is
left of p after one being the p of the next.

SGLang verifies trees, of EAGLE's drafts. Sources: SpecInfer, arXiv 2305.09781; Medusa,
arXiv 2401.10774; EAGLE, arXiv 2401.15077; siblings without replacement: Sequoia, arXiv 2402.12374.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from acceptance import SpecDecodeStats
from inverse_cdf import draw
from spec_decode import token_probs

ROOT = -1  # the parent of a node that stands right behind the context


class TreeModel(Protocol):
    """A model that can be told what each token sees; `SimpleLM` is one."""

    def get_logits(
        self, token_ids: Sequence[int], positions: torch.Tensor, attention_mask: torch.Tensor
    ) -> torch.Tensor:  # [seq_len, vocab_size]
        ...


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Node i is the draft `token_ids[i]` behind node `parents[i] < i`, or behind the context."""

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.parents):
            raise ValueError(
                f"parents has length {len(self.parents)}: it must have that of token_ids, "
                f"{len(self.token_ids)}"
            )
        for node, parent in enumerate(self.parents):
            if not ROOT <= parent < node:
                raise ValueError(f"parents[{node}] is {parent!r}: it must be in [-1, {node})")

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def depths(self) -> tuple[int, ...]:
        """0 for a child of the context."""
        return tuple(tree_positions(self.parents).tolist())

    def children(self, node: int) -> list[int]:
        return [child for child, parent in enumerate(self.parents) if parent == node]


def tree_positions(parents: Sequence[int], context_len: int = 0) -> torch.Tensor:
    """[n] int64: where each node stands behind a context of so many tokens."""
    positions: list[int] = []
    for parent in parents:
        positions.append(context_len if parent == ROOT else positions[parent] + 1)
    return torch.tensor(positions, dtype=torch.int64)


def tree_attention_mask(parents: Sequence[int]) -> torch.Tensor:
    """[n, n] bool: row i has the ancestors of node i, and i."""
    mask = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent != ROOT:
            mask[node] |= mask[parent]
    return mask


def tree_logits(model: TreeModel, context_ids: Sequence[int], tree: DraftTree) -> torch.Tensor:
    """[n + 1, vocab_size], by one pass: row 0 is about the token behind the context, row i + 1
    about that behind node i."""
    context_len = len(context_ids)
    if context_len == 0:
        raise ValueError("context_ids is []: it must be at least one token, to predict from")
    mask = torch.ones(context_len + len(tree), context_len + len(tree), dtype=torch.bool).tril()
    mask[context_len:, context_len:] = tree_attention_mask(tree.parents)
    positions = torch.cat([torch.arange(context_len), tree_positions(tree.parents, context_len)])
    logits = model.get_logits([*context_ids, *tree.token_ids], positions, mask)
    return logits[context_len - 1 :]


# -- greedy


def build_draft_tree(
    draft_model: TreeModel, context_ids: Sequence[int], branching: Sequence[int] = (3, 2, 1)
) -> DraftTree:
    """The draft model's `branching[0]` most likely tokens, behind each of them the `branching[1]`
    most likely, and so on, depth by depth; of equals the lowest ids. One draft pass per depth."""

    def most_likely(logits: torch.Tensor, num: int) -> list[int]:
        return logits.argsort(descending=True, stable=True)[:num].tolist()

    return _grow(draft_model, context_ids, branching, most_likely)[0]


def verify_tree_greedy(
    target_argmax: torch.Tensor,  # [n + 1] int64: the target's token behind the context, each node
    tree: DraftTree,
) -> tuple[list[int], list[int]]:
    """`(tokens, path)`: the nodes of the longest path on which the target agrees, their tokens, and
    one token of the target's. Of paths of the same length, the one whose last node comes first."""
    if len(target_argmax) != len(tree) + 1:
        raise ValueError(
            f"target_argmax has length {len(target_argmax)}: it must be that of the tree and one "
            f"more, {len(tree) + 1}"
        )
    expected = target_argmax.tolist()
    paths: dict[int, list[int]] = {ROOT: []}  # to each accepted node
    for node, (token, parent) in enumerate(zip(tree.token_ids, tree.parents)):
        if parent in paths and token == expected[parent + 1]:
            paths[node] = [*paths[parent], node]
    path = max(paths.values(), key=len)  # the first of equals
    last = path[-1] if path else ROOT
    return [*(tree.token_ids[node] for node in path), expected[last + 1]], path


# -- sampled


def sample_draft_tree(
    draft_model: TreeModel,
    context_ids: Sequence[int],
    branching: Sequence[int] = (3, 2, 1),
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> tuple[DraftTree, torch.Tensor]:
    """`(tree, draft_probs [m + 1, vocab_size])`: siblings drawn one after the other, none twice.
    Row 0 is what the children of the context were drawn from, row i + 1 those of node i; leaves
    come last and have none."""

    def without_replacement(logits: torch.Tensor, num: int) -> list[int]:
        probs, tokens = token_probs(logits, temperature), []
        for _ in range(min(num, int((probs > 0).sum()))):
            tokens.append(_draw(probs, generator))
            probs[tokens[-1]] = 0
            probs = probs / probs.sum()
        return tokens

    tree, logits = _grow(draft_model, context_ids, branching, without_replacement)
    return tree, token_probs(logits, temperature)


def try_siblings(
    p: torch.Tensor,  # [vocab_size] float64, the target's
    q: torch.Tensor,  # [vocab_size] float64, what the siblings were drawn from
    siblings: Sequence[int],
) -> tuple[list[float], torch.Tensor]:
    """`(chances, residual [vocab_size])`: the chance of each to be accepted once those before it
    were rejected, and what to draw from if all were."""
    chances = []
    for token in siblings:
        # min(1, p / q), and 0 where both are 0
        chances.append(float(p[token] / torch.maximum(p, q)[token]) if p[token] > 0 else 0.0)
        residual = (p - q).clamp(min=0)
        p = residual / residual.sum() if residual.sum() > 0 else p
        q = q.index_fill(0, torch.tensor(token), 0)
        q = q / q.sum()
    return chances, p


def verify_tree_sampled(
    target_probs: torch.Tensor,  # [n + 1, vocab_size] float64
    tree: DraftTree,
    draft_probs: torch.Tensor,  # [m + 1, vocab_size] float64, of `sample_draft_tree`
    generator: torch.Generator | None = None,
) -> tuple[list[int], list[int]]:
    """`(tokens, path)`: as `verify_tree_greedy`, with the target's law."""
    path: list[int] = []
    while True:
        node = path[-1] if path else ROOT
        children = tree.children(node)
        siblings = [tree.token_ids[child] for child in children]
        q = draft_probs[node + 1] if children else target_probs[node + 1]
        chances, residual = try_siblings(target_probs[node + 1], q, siblings)
        for child, chance in zip(children, chances):
            if float(torch.rand((), dtype=torch.float64, generator=generator)) < chance:
                path.append(child)
                break
        else:
            tokens = [tree.token_ids[node] for node in path]
            return [*tokens, _draw(residual, generator)], path


# -- both


def tree_decode_step(
    target_model: TreeModel,
    draft_model: TreeModel,
    context_ids: Sequence[int],
    branching: Sequence[int] = (3, 2, 1),
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> tuple[list[int], SpecDecodeStats]:
    """Grow a tree, verify it: the next 1 to `len(branching) + 1` tokens, by one target pass."""
    if temperature == 0:
        tree = build_draft_tree(draft_model, context_ids, branching)
        target_argmax = tree_logits(target_model, context_ids, tree).argmax(dim=-1)
        tokens, path = verify_tree_greedy(target_argmax, tree)
    else:
        tree, q = sample_draft_tree(draft_model, context_ids, branching, temperature, generator)
        p = token_probs(tree_logits(target_model, context_ids, tree), temperature)
        tokens, path = verify_tree_sampled(p, tree, q, generator)
    # Not by place: several drafts of a tree share one.
    stats = SpecDecodeStats(1, len(tree), len(path), num_drafted_passes=int(len(tree) > 0))
    return tokens, stats


def _grow(
    draft_model: TreeModel,
    context_ids: Sequence[int],
    branching: Sequence[int],
    choose: Callable[[torch.Tensor, int], list[int]],
) -> tuple[DraftTree, torch.Tensor]:
    """Level by level: `choose(logits, num)` the children of each node of the last level. With the
    logits [m + 1, vocab_size] of the context's end and of all nodes that have children."""
    for depth, num in enumerate(branching):
        if num < 1:
            raise ValueError(f"branching[{depth}] is {num!r}: it must be >= 1")
    tree, logits = DraftTree(), torch.empty(0, 0)
    level = [ROOT]
    for num in branching:
        logits = tree_logits(draft_model, context_ids, tree)
        nodes = [(token, node) for node in level for token in choose(logits[node + 1], num)]
        level = list(range(len(tree), len(tree) + len(nodes)))
        tree = DraftTree(
            tree.token_ids + tuple(token for token, _ in nodes),
            tree.parents + tuple(parent for _, parent in nodes),
        )
    return tree, logits


def _draw(probs: torch.Tensor, generator: torch.Generator | None) -> int:
    u = torch.rand(1, dtype=torch.float64, generator=generator)
    return int(draw(probs[None], u)[0])
