"""The shard of each rank of a checkpoint, without processes and messages."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from batch_invariance import make_batch_invariant
from common.assembly.assembly import kv_namespace
from common.models import loader
from common.models.collectives import Collectives
from common.models.linear import linear_layers
from common.models.loader import load_model
from common.models.ranks import Ranks
from common.models.test_loader import CountingFile, edit_weights
from common.parallel.sharded_model import ShardedModel, rank_config
from common.runner.kv_sizing import allocate_kv_cache
from common.tests.model_cases import save_case
from common.tests.paged_harness import PagedHarness
from invariant_attention import InvariantAttentionBackend
from workshop.measure.bench.random_weights import QWEN3_0_6B

LAYOUTS = [(1, 1), (2, 1), (4, 1), (1, 2), (1, 3), (2, 2), (4, 3)]
WEIGHTS = "model.safetensors"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def load(path: Path, ranks: Ranks, dtype: torch.dtype = torch.float64) -> loader.LoadedModel:
    return load_model(path, dtype, make=partial(ShardedModel, collectives=Collectives(ranks)))


def all_ranks(tp_size: int, num_stages: int) -> list[Ranks]:
    return [Ranks(tp_size, num_stages, rank) for rank in range(tp_size * num_stages)]


@pytest.fixture
def read(monkeypatch) -> Counter:
    """Numbers read, by tensor."""
    read = Counter()
    real = loader._open_file
    monkeypatch.setattr(loader, "_open_file", lambda *a: CountingFile(real(*a), read))
    return read


@pytest.mark.sample
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "name",
    [
        *("qwen3", "qwen3-biases", "qwen2-untied", "llama-biases"),
        *("gemma3-biases", "qwen3-moe", "mixtral"),
    ],
)
def test_the_slices_of_all_ranks_put_together_are_the_checkpoint(name, layout, tmp_path, read):
    stored = load_file(save_case(name, tmp_path) / WEIGHTS)
    together = {key: torch.full_like(tensor, float("nan")) for key, tensor in stored.items()}
    holders: Counter = Counter()
    for ranks in all_ranks(*layout):
        read.clear()
        model = load(tmp_path, ranks).model
        assert read.total() <= sum(p.numel() for p in model.parameters())  # its own, and no more
        for key, tensor in model.checkpoint_tensors().items():
            if tensor.target is None:
                assert key not in read
                continue
            values = tensor.target[0] if "_norm" in key and "self" in key else tensor.target
            values = values.double() - model.config.norm_offset * key.endswith("norm.weight")
            assert read[key] == values.numel()
            part = together[key][tensor.part]
            assert torch.equal(values, torch.where(part.isnan(), values, part))  # who agree, share
            together[key][tensor.part] = values
            holders[key] += values.numel()
    assert together.keys() == stored.keys()
    exact = dict(rtol=0, atol=0 if name != "gemma3-biases" else 2e-7)  # norms are in float32
    torch.testing.assert_close(together, stored, **exact)
    for key in stored:
        is_matrix = key.endswith(("proj.weight", "w1.weight"))
        if is_matrix and not key.endswith(("k_proj.weight", "v_proj.weight")):
            assert holders[key] == stored[key].numel(), "no two ranks have the same part"


@pytest.mark.parametrize(
    "change, size, allowed",
    [
        ({}, 3, "1, 2, 4, 8, 16"),
        ({"intermediate_size": 3070}, 4, "1, 2"),
        ({"vocab_size": 9}, 4, "1, 2"),  # 4 ranks of 3 tokens: nothing for the last one
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_the_allowed_ones(change, size, allowed):
    config = replace(QWEN3_0_6B, **change)
    with pytest.raises(
        ValueError, match=f"tensor_parallel_size must be {allowed}, so .*got {size}"
    ):
        rank_config(config, Ranks(size, 1, 0))


def test_the_kv_cache_has_the_rank_s_heads_and_layers_and_a_name_of_its_own(tmp_path):
    save_case("qwen2", tmp_path)  # 4 KV heads, 3 layers
    names = set()
    every = [ranks for layout in LAYOUTS for ranks in all_ranks(*layout)]
    for ranks in every:
        loaded = load(tmp_path, ranks)
        kv_cache = allocate_kv_cache(loaded, 3, 4)
        assert len(kv_cache.key_cache) == len(ranks.layers(3))
        assert kv_cache.key_cache[0].shape[2] == 4 // ranks.tensor_parallel_size
        names.add(kv_namespace(loaded, kv_cache)[2:])
    assert len(names) == len(every) and () in names, "one process alone has no more"


def test_a_wrong_checkpoint_is_refused_by_every_rank(tmp_path):
    """Even if another rank would load the tensor that is missing, or has that shape."""
    name = "model.layers.2.mlp.up_proj.weight"
    for wrong, message in (
        (torch.zeros(20, 32), r"one shape, got \(20, 32\) in the checkpoint and \(40, 32\) by"),
        (None, f"lacks .*{name}"),
    ):
        change = {} if wrong is None else {name: wrong}
        edit_weights(save_case("qwen2-untied", tmp_path), lambda t: (t.pop(name), t.update(change)))
        for ranks in all_ranks(2, 2):
            with pytest.raises(ValueError, match=message):
                load(tmp_path, ranks)


def test_a_tied_matrix_with_two_values_is_refused_by_the_rank_that_has_that_part(tmp_path):
    save_case("qwen3", tmp_path)
    edit_weights(tmp_path, lambda t: t.update({HEAD: t[EMBEDDING].clone()}))
    edit_weights(tmp_path, lambda t: t[HEAD][60].add_(1e-9))  # of the second of two
    for ranks in all_ranks(2, 3):
        if ranks.tp_rank == 0 or ranks.stage == 1:
            load(tmp_path, ranks)
        else:
            with pytest.raises(ValueError, match=r"tie_word_embeddings must .*differ"):
                load(tmp_path, ranks)


# -- stages, one after the other in this process


def run_stages(harnesses: list[PagedHarness], work: list) -> torch.Tensor:
    hidden = None
    for harness in harnesses:
        hidden = harness.step(work, None, hidden)
    return hidden


def test_stages_keep_the_bits_of_a_batch_invariant_model(tmp_path):
    """Each row alone and in company, in three stages: the bits of one process."""
    save_case("qwen3-biases", tmp_path)
    models = [load_model(tmp_path, torch.float32).model]
    models += [load(tmp_path, ranks, torch.float32).model for ranks in all_ranks(1, 3)]
    for model in models:
        model.pack_weights()
        mlps = [layer.mlp for layer in model.layers]
        make_batch_invariant(linear_layers(model), mlps, "silu", torch.float32, 8)
    one, *stages = (PagedHarness(m, 3, backend=InvariantAttentionBackend()) for m in models)
    prompts = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7]]
    alone = torch.cat([run_stages([one], [(i, 0, p)]) for i, p in enumerate(prompts)])
    together = run_stages(stages, [(i, 0, p) for i, p in enumerate(prompts)])
    assert torch.equal(alone, together)
