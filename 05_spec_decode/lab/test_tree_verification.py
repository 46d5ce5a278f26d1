"""Trees of drafts: what each node sees, against `transformers`; what is accepted, against plain
decoding, the chain and scripts; and the law of sampled trees, by enumeration."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import permutations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from acceptance import SpecDecodeStats
from bounded_loops import as_long_as
from common.tests.model_cases import SHAPE
from draft_acceptance import acceptance_probability
from spec_decode import (
    SimpleLM,
    draft_generate,
    token_probs,
    verify_and_sample,
)
from test_spec_decode import CONTEXT, TINY_P_VALUE, ConstantLM, p_value, seeded, two_token_law
from toy_generation import plain_generate
from tree_verification import (
    ROOT,
    DraftTree,
    build_draft_tree,
    sample_draft_tree,
    tree_attention_mask,
    tree_decode_step,
    tree_logits,
    tree_positions,
    try_siblings,
    verify_tree_greedy,
    verify_tree_sampled,
)

THE, A, MY, CAT, DOG, SAT = 10, 11, 12, 13, 14, 15
# The tree of the module's text.
TREE = DraftTree((THE, A, MY, CAT, DOG, CAT), (ROOT, ROOT, ROOT, 0, 0, 1))


def random_tree(num_nodes: int, vocab_size: int, seed: int) -> DraftTree:
    """In no order but that parents come first; siblings may be equal, as two proposers together
    may bring them."""
    rng = random.Random(seed)
    return DraftTree(
        tuple(rng.randrange(vocab_size) for _ in range(num_nodes)),
        tuple(rng.randrange(ROOT, node) for node in range(num_nodes)),
    )


def path_to(tree: DraftTree, node: int) -> list[int]:
    """Ancestors and the node itself, from the context on."""
    return [] if node == ROOT else [*path_to(tree, tree.parents[node]), node]


def tokens_of(tree: DraftTree, path: Sequence[int]) -> list[int]:
    return [tree.token_ids[node] for node in path]


class CountingLM:
    def __init__(self, model: SimpleLM) -> None:
        self.model = model
        self.num_passes = 0

    def get_logits(self, *args: object) -> torch.Tensor:
        self.num_passes += 1
        return self.model.get_logits(*args)


class TransformersLM:
    """A tiny random model of `transformers`, told positions and mask in its own terms."""

    def __init__(self, family: str, seed: int) -> None:
        model_type, config_type = {
            "llama": (LlamaForCausalLM, LlamaConfig),
            "qwen3": (Qwen3ForCausalLM, Qwen3Config),
        }[family]
        torch.manual_seed(seed)
        config = config_type(
            **SHAPE | {"vocab_size": 50, "num_key_value_heads": 2, "initializer_range": 0.5},
            head_dim=8,
            attn_implementation="sdpa",  # "eager" takes its softmax in float32
        )
        self.model = model_type(config).double().eval()

    @torch.inference_mode()
    def get_logits(
        self,
        token_ids: Sequence[int],
        positions: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        inputs = {}
        if positions is not None:
            inputs["position_ids"] = positions[None]
        if attention_mask is not None:
            mask = torch.zeros(attention_mask.shape, dtype=torch.float64)
            mask = mask.masked_fill(~attention_mask, torch.finfo(torch.float64).min)
            inputs["attention_mask"] = mask[None, None]  # added to the scores
        return self.model(torch.tensor([list(token_ids)]), use_cache=False, **inputs).logits[0]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def transformers_lm(request: pytest.FixtureRequest) -> TransformersLM:
    return TransformersLM(request.param, seed=0)


# -- what a node sees


def test_mask_and_positions_of_the_tree_in_the_text():
    assert tree_attention_mask(TREE.parents).int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [0, 1, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0],
        [1, 0, 0, 1, 0, 0],
        [1, 0, 0, 0, 1, 0],
        [0, 1, 0, 0, 0, 1],
    ]
    assert TREE.depths == (0, 0, 0, 1, 1, 1)
    assert tree_positions(TREE.parents, context_len=7).tolist() == [7, 7, 7, 8, 8, 8]
    assert TREE.children(ROOT) == [0, 1, 2] and TREE.children(0) == [3, 4]


@pytest.mark.parametrize("seed", range(5))
def test_a_node_sees_its_ancestors_and_itself_and_stands_behind_them(seed):
    tree = random_tree(12, 50, seed)
    mask, positions = tree_attention_mask(tree.parents), tree_positions(tree.parents, 4)
    for node in range(12):
        path = path_to(tree, node)
        assert mask[node].nonzero().flatten().tolist() == sorted(path)
        assert positions[node] == 4 + len(path) - 1


@pytest.mark.parametrize("seed", range(4))
def test_one_pass_over_a_tree_is_a_plain_pass_over_each_path(transformers_lm, seed):
    """The toy model takes trees as a real one does."""
    tree = random_tree(10, 50, seed)
    context = random.Random(seed).choices(range(50), k=6)
    for model in (transformers_lm, SimpleLM(50)):
        logits = tree_logits(model, context, tree)
        assert logits.shape == (11, 50)
        for node in range(ROOT, 10):
            plain = model.get_logits([*context, *tokens_of(tree, path_to(tree, node))])[-1]
            torch.testing.assert_close(logits[node + 1], plain, rtol=0, atol=1e-10)


def test_the_oracle_would_notice_a_wrong_mask_or_wrong_positions(transformers_lm):
    ids, context_len = [*CONTEXT, *TREE.token_ids], len(CONTEXT)
    causal = torch.ones(9, 9, dtype=torch.bool).tril()
    mask = causal.clone()
    mask[context_len:, context_len:] = tree_attention_mask(TREE.parents)
    positions = torch.tensor([0, 1, 2, 3, 3, 3, 4, 4, 4])
    right = tree_logits(transformers_lm, CONTEXT, TREE)
    rows = slice(context_len - 1, None)
    torch.testing.assert_close(transformers_lm.get_logits(ids, positions, mask)[rows], right)
    wrong_mask = transformers_lm.get_logits(ids, positions, causal)[rows]
    wrong_positions = transformers_lm.get_logits(ids, torch.arange(9), mask)[rows]
    for wrong in (wrong_mask, wrong_positions):
        assert (wrong - right)[-1].abs().max() > 1e-3


# -- which path is accepted: scripts for the tree of the text


@pytest.mark.parametrize(
    ("says", "tokens", "path"),
    [
        # behind:  context, the, a, my, the cat, the dog, a cat
        ([THE, CAT, 1, 2, SAT, 3, 4], [THE, CAT, SAT], [0, 3]),
        ([THE, DOG, 1, 2, 3, SAT, 4], [THE, DOG, SAT], [0, 4]),
        ([A, 1, CAT, 2, 3, 4, SAT], [A, CAT, SAT], [1, 5]),
        ([MY, 1, 2, CAT, 3, 4, 5], [MY, CAT], [2]),  # a leaf: its own token comes for nothing
        ([THE, SAT, CAT, CAT, 1, 1, 1], [THE, SAT], [0]),  # wrong at the second place
        ([SAT, CAT, CAT, CAT, 1, 1, 1], [SAT], []),  # wrong at the first: what is behind is lost
        ([A, 1, DOG, 2, 3, 4, 5], [A, DOG], [1]),  # "dog" is a draft, but not behind "a"
        ([CAT, 1, 2, 3, SAT, 4, SAT], [CAT], []),  # "cat" is one, but not behind the context
        ([SAT, THE, A, MY, CAT, DOG, CAT], [SAT], []),  # each would repeat itself (Trap 36)
    ],
)
def test_the_walk_goes_on_as_long_as_a_child_is_what_the_target_says(says, tokens, path):
    """A node is judged by its parent's row, and not by its own."""
    assert verify_tree_greedy(torch.tensor(says), TREE) == (tokens, path)


@pytest.mark.parametrize("seed", range(50))
def test_the_path_is_what_a_search_through_all_paths_finds(seed):
    tree = random_tree(9, 2, seed)
    says = random.Random(-seed - 1).choices(range(2), k=10)

    def is_accepted(path: list[int]) -> bool:
        before = [ROOT, *path]
        return all(tree.token_ids[node] == says[b + 1] for b, node in zip(before, path))

    paths = [path_to(tree, node) for node in range(ROOT, 9)]
    longest = max(filter(is_accepted, paths), key=len)
    tokens, path = verify_tree_greedy(torch.tensor(says), tree)
    assert path == longest, "of equals the first"
    assert tokens == [*tokens_of(tree, path), says[path[-1] + 1 if path else 0]]


# -- which tree is built


@pytest.mark.parametrize("branching", [(3, 2, 1), (1, 1, 1), (2,), (4, 3), ()])
def test_the_children_of_a_node_are_the_most_likely_tokens_behind_its_path(branching):
    model = CountingLM(SimpleLM(20))
    tree = build_draft_tree(model, CONTEXT, branching)
    assert model.num_passes == len(branching)
    for node in range(ROOT, len(tree)):
        depth = 0 if node == ROOT else tree.depths[node] + 1
        logits = model.model.get_logits([*CONTEXT, *tokens_of(tree, path_to(tree, node))])[-1]
        num_children = branching[depth] if depth < len(branching) else 0
        expected = sorted(range(20), key=lambda t: -logits[t])[:num_children]
        assert tokens_of(tree, tree.children(node)) == expected
    assert list(tree.depths) == sorted(tree.depths)


def test_of_equally_likely_tokens_the_lowest_are_taken_and_no_more_than_there_are():
    class Undecided:
        def get_logits(self, token_ids: Sequence[int], *_: object) -> torch.Tensor:
            return torch.zeros(len(token_ids), 4)

    assert build_draft_tree(Undecided(), [0], (2, 1)).token_ids == (0, 1, 0, 0)
    assert build_draft_tree(Undecided(), [0], (9,)).token_ids == (0, 1, 2, 3)


# -- greedy, end to end


def tree_generate(
    target: object, draft: object, context: Sequence[int], num_tokens: int, branching: Sequence[int]
) -> tuple[list[int], SpecDecodeStats]:
    tokens, stats = [], SpecDecodeStats()
    for _ in as_long_as(lambda: len(tokens) < num_tokens):
        new_tokens, step = tree_decode_step(target, draft, [*context, *tokens], branching)
        assert len(new_tokens) == step.num_accepted + 1
        tokens += new_tokens
        stats += step
    return tokens[:num_tokens], stats


@pytest.mark.parametrize("branching", [(3, 2, 1), (2, 2, 2), (1, 1, 1), (5,), ()])
@pytest.mark.parametrize("seed", range(6))
def test_greedy_tokens_are_those_of_plain_decoding(seed, branching):
    target = SimpleLM(30, seed=seed)
    draft = target.noisy_copy(0.4, seed=seed)
    plain = plain_generate(target, CONTEXT, 20, temperature=0)
    tokens, stats = tree_generate(target, draft, CONTEXT, 20, branching)
    assert tokens == plain
    if branching:
        assert 0 < stats.num_accepted < stats.num_drafted


@pytest.mark.parametrize("branching", [(3, 2, 1), (1, 1, 1, 1)])
def test_greedy_tokens_are_those_of_transformers(transformers_lm, branching):
    family = transformers_lm.model.config.model_type
    for draft in (TransformersLM(family, seed=1), transformers_lm):
        tokens, stats = tree_generate(transformers_lm, draft, CONTEXT, 12, branching)
        output = transformers_lm.model.generate(
            torch.tensor([CONTEXT]), max_new_tokens=12, do_sample=False
        )
        assert tokens == output[0, len(CONTEXT) :].tolist()
    assert stats.num_passes == -(-12 // (len(branching) + 1))


@pytest.mark.parametrize("noise", [0.0, 0.2, 0.6, 1.0])
def test_a_tree_without_branches_is_a_chain(noise):
    target = SimpleLM(30)
    draft = target.noisy_copy(noise, seed=3)
    tokens: list[int] = []
    for _ in as_long_as(lambda: len(tokens) < 30):
        context = [*CONTEXT, *tokens]
        drafts, _ = draft_generate(draft, context, 3, temperature=0)
        assert build_draft_tree(draft, context, (1, 1, 1)) == DraftTree(tuple(drafts), (-1, 0, 1))
        chain, num_accepted = verify_and_sample(target, context, drafts, temperature=0)
        new_tokens, stats = tree_decode_step(target, draft, context, (1, 1, 1))
        assert (new_tokens, stats) == (chain, SpecDecodeStats(1, 3, num_accepted, 1))
        tokens += new_tokens


def test_second_choices_bring_more_tokens_for_the_same_passes():
    tokens_per_pass = []
    for branching in [(1, 1, 1), (2, 1, 1), (2, 2, 2)]:
        total = SpecDecodeStats()
        for seed in range(5):
            target = SimpleLM(30, seed=seed)
            draft = target.noisy_copy(0.4, seed=seed)
            total += tree_generate(target, draft, CONTEXT, 30, branching)[1]
        tokens_per_pass.append(total.tokens_per_pass)
    assert tokens_per_pass == sorted(tokens_per_pass)
    assert tokens_per_pass[2] > 1.1 * tokens_per_pass[0]


def test_a_step_is_one_target_pass():
    target, draft = CountingLM(SimpleLM(30)), CountingLM(SimpleLM(30, seed=1))
    tokens, stats = tree_decode_step(target, draft, CONTEXT)
    assert (target.num_passes, draft.num_passes) == (1, 3)
    assert stats == SpecDecodeStats(1, 3 + 6 + 6, len(tokens) - 1, 1)


# -- sampled


def draw_chance(q: torch.Tensor, siblings: Sequence[int]) -> float:
    """Of drawing just these, in this order, none twice."""
    chance, rest = 1.0, 1.0
    for token in siblings:
        chance *= float(q[token]) / rest
        rest -= float(q[token])
    return chance


def random_law(vocab_size: int, seed: int, zeros: Sequence[int] = ()) -> torch.Tensor:
    law = torch.rand(vocab_size, generator=seeded(seed), dtype=torch.float64).pow(2)
    law[list(zeros)] = 0
    return law / law.sum()


LAWS = [
    (random_law(5, 1), random_law(5, 2)),
    (random_law(5, 3, zeros=[0, 2]), random_law(5, 4, zeros=[1])),
    (random_law(4, 5), random_law(4, 5)),  # equal
    (random_law(4, 6, zeros=[0, 1]), random_law(4, 7, zeros=[2, 3])),  # nothing in common
    (random_law(3, 8), random_law(3, 9, zeros=[0, 2])),  # certain
]


@pytest.mark.parametrize(("p", "q"), LAWS)
@pytest.mark.parametrize("num_siblings", [0, 1, 2, 3])
def test_siblings_tried_in_turn_leave_the_law_of_the_target(p, q, num_siblings):
    """All siblings that can be drawn, each accepted or none: summed, it is p. No sampling here."""
    support = q.nonzero().flatten().tolist()
    law = torch.zeros_like(p)
    total = accepted = 0.0
    for siblings in permutations(support, min(num_siblings, len(support))):
        chances, residual = try_siblings(p, q, siblings)
        reached = draw_chance(q, siblings)
        total += reached
        for token, chance in zip(siblings, chances):
            law[token] += reached * chance
            accepted += reached * chance
            reached *= 1 - chance
        law += reached * residual
    assert total == pytest.approx(1)
    torch.testing.assert_close(law, p, rtol=0, atol=1e-14)
    if num_siblings == 1:
        assert accepted == pytest.approx(float(acceptance_probability(p, q)))
    elif num_siblings > 1 and len(support) > 1 and (p * q).sum() > 0:
        assert accepted >= float(acceptance_probability(p, q)) - 1e-12


def test_what_cannot_be_is_never_accepted():
    """Trap 46."""
    p = torch.tensor([0.0, 0.6, 0.4]).double()
    q = torch.tensor([0.5, 0.0, 0.5]).double()
    chances, residual = try_siblings(p, q, [0, 2])
    assert chances[0] == 0 and residual[0] == 0
    chances, residual = try_siblings(p, torch.tensor([0.0, 0.0, 1.0]).double(), [0, 0, 0])
    assert chances == [0, 0, 0] and torch.equal(residual[0], torch.tensor(0.0).double())
    chances, _ = try_siblings(p, torch.tensor([0.0, 1.0, 0.0]).double(), [1, 1])
    assert chances == [pytest.approx(0.6), 0]


def test_siblings_are_drawn_without_replacement():
    law = [0.5, 0.3, 0.2, 0.0]

    model, q, generator = ConstantLM(law), torch.tensor(law, dtype=torch.float64), seeded(3)
    drawn = [sample_draft_tree(model, [0], (2,), 1.0, generator)[0].token_ids for _ in range(600)]
    chances = {pair: draw_chance(q, pair) for pair in permutations(range(3), 2)}
    assert p_value(drawn, chances) > TINY_P_VALUE
    # There are three tokens to draw, not nine; how unlikely two of them are does not matter.
    for temperature in (1.0, 0.01):
        tree, _ = sample_draft_tree(model, [0], (9,), temperature, generator)
        assert sorted(tree.token_ids) == [0, 1, 2]


def test_the_defaults_are_one_tree():
    model = SimpleLM(20)
    assert build_draft_tree(model, CONTEXT) == build_draft_tree(model, CONTEXT, (3, 2, 1))
    default = sample_draft_tree(model, CONTEXT, generator=seeded(1))
    tree, probs = sample_draft_tree(model, CONTEXT, (3, 2, 1), 1.0, seeded(1))
    assert default[0] == tree and torch.equal(default[1], probs)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_the_rows_of_draft_probs_are_those_that_children_were_drawn_from(temperature):
    model = SimpleLM(20)
    tree, probs = sample_draft_tree(model, CONTEXT, (2, 2, 1), temperature, seeded(1))
    inner = [node for node in range(ROOT, len(tree)) if tree.children(node)]
    assert inner == list(range(ROOT, len(probs) - 1)) and len(tree) == 2 + 4 + 4
    for node in inner:
        logits = model.get_logits([*CONTEXT, *tokens_of(tree, path_to(tree, node))])[-1]
        torch.testing.assert_close(probs[node + 1], token_probs(logits, temperature))


@pytest.mark.parametrize(
    ("branching", "temperature"),
    [((2, 2), 1.0), pytest.param((3, 1), 2.0, marks=pytest.mark.slow)],
)
def test_two_sampled_tokens_have_the_law_of_the_target(branching, temperature):
    target = SimpleLM(3, seed=2)
    draft = target.noisy_copy(0.7)
    generator, pairs = seeded(5), []
    for _ in range(600):
        tokens: list[int] = []
        for _ in as_long_as(lambda: len(tokens) < 2):
            context = [*CONTEXT, *tokens]
            step = target, draft, context, branching, temperature, generator
            tokens += tree_decode_step(*step)[0]
        pairs.append(tuple(tokens[:2]))
    assert p_value(pairs, two_token_law(target, temperature)) > TINY_P_VALUE


def test_a_perfect_draft_model_is_always_accepted():
    model, generator = SimpleLM(20), seeded(1)
    for _ in range(10):
        tokens, stats = tree_decode_step(model, model, CONTEXT, (2, 2, 1), 1.0, generator)
        assert stats.num_accepted == 3 and len(tokens) == 4


def test_a_certain_target_is_followed_through_the_tree():
    says = torch.tensor([A, 1, CAT, 2, 3, 4, SAT])
    q = torch.full((6, 20), 1 / 20, dtype=torch.float64)
    p = torch.eye(20, dtype=torch.float64)[says]
    assert verify_tree_sampled(p, TREE, q, seeded(0)) == ([A, CAT, SAT], [1, 5])


# -- bad input

MODEL = SimpleLM(8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: DraftTree((1, 2), (ROOT,)), "parents has length 1: it must have .* 2"),
        (lambda: DraftTree((1, 2), (ROOT, 1)), r"parents\[1\] is 1: it must be in \[-1, 1\)"),
        (lambda: DraftTree((1,), (-2,)), r"parents\[0\] is -2"),
        (lambda: build_draft_tree(MODEL, [1], (2, 0)), r"branching\[1\] is 0"),
        (lambda: sample_draft_tree(MODEL, [1], (-1,)), r"branching\[0\] is -1"),
        (lambda: build_draft_tree(MODEL, []), r"context_ids is \[\]"),
        (lambda: tree_logits(MODEL, [], TREE), r"context_ids is \[\]"),
        (lambda: tree_decode_step(MODEL, MODEL, [1], (2,), -1.0), "temperature is -1.0"),
        (
            lambda: verify_tree_greedy(torch.zeros(6, dtype=torch.int64), TREE),
            "target_argmax has length 6: .* 7",
        ),
    ],
)
def test_bad_input_is_refused_with_its_name_and_value(call, message):
    with pytest.raises(ValueError, match=message):
        call()
