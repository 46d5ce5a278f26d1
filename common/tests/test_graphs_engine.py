"""An engine that replays its decode steps: which are replayed, and which engines have graphs. On a
CPU, by the emulator. Random runs and requests of every kind are rows of `claims.py`."""

from __future__ import annotations

import logging
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common.assembly import assembly
from common.assembly.scheduler_assembly import Limits
from common.engine import EngineConfig, LLMEngine
from common.models.layer_groups import deal_layers
from common.models.loader import load_model
from common.models.ranks import Ranks
from common.runner.graph_maker import GraphMaker
from common.runner.graphs import GraphRunner, ReplayMetadata, graph_buckets
from common.tests.engine_oracle import (
    MAX_TOKENS,
    checked_engine,
    finish,
    greedy_params,
    num_replays,
    paged_runner,
    serve,
)
from kernel_launch import DecodeTuning
from paged_attention_triton import TritonAttentionBackend
from tensor_attention import TensorAttentionBackend

CPU = torch.device("cpu")
LONGEST = 100  # of the oracle's prompts with their outputs


def graph_engine(loaded, **config) -> LLMEngine:
    config = {"max_model_len": LONGEST, "emulate_graphs": True} | config
    return checked_engine(loaded, **config)


def buckets_of(engine: LLMEngine) -> list[int]:
    """The bucket of each replay, from now on."""
    runner, found = paged_runner(engine), []
    assert isinstance(runner, GraphRunner)
    real = runner.graphs.replay

    def replay(bucket: int, num_rows: int, num_logit_rows: int) -> torch.Tensor:
        found.append(bucket)
        return real(bucket, num_rows, num_logit_rows)

    runner.graphs.replay = replay
    return found


@pytest.mark.sample
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("max_num_seqs", [1, 3, 6, 9])
def test_every_bucket_with_requests_that_come_and_go(max_num_seqs, overlap, oracle, loaded) -> None:
    """And are preempted: each number of rows finds its bucket, and each bucket is replayed."""
    engine = graph_engine(
        loaded,
        max_num_seqs=max_num_seqs,
        overlap_scheduling=overlap,
        preempt_every=7,
        shuffle_batch=True,
        block_size=(1, 4, 16)[max_num_seqs % 3],
    )
    found, rng = buckets_of(engine), random.Random(max_num_seqs)
    indices = [rng.randrange(len(oracle.prompts)) for _ in range(max_num_seqs + 3)]
    lengths = [min(MAX_TOKENS, 3 + 2 * i) for i in range(len(indices))]
    for i, index in enumerate(indices):
        engine.add_request(str(i), oracle.prompts[index], greedy_params(lengths[i]))
    outputs = finish(engine)
    for i, index in enumerate(indices):
        tokens = outputs[str(i)].outputs[0].token_ids
        assert tokens == oracle.expected(index, lengths[i]), f"request {i}"
    assert set(found) == set(graph_buckets(max_num_seqs))


class CountMerges(TorchDispatchMode):
    num_merges = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_merges += "_merge_splits_kernel" in func.__name__
        return func(*args, **(kwargs or {}))


def test_splits_are_merged_only_where_a_sequence_has_two(random_oracle, monkeypatch) -> None:
    """A graph has to hold for the longest sequence that can come, so steps of short ones have
    graphs of their own. A sequence that grows goes from those to the others."""
    monkeypatch.setattr(TritonAttentionBackend, "tuning", DecodeTuning(split_keys=16))
    loaded = load_model(random_oracle.path, torch.float32, CPU)
    engine = graph_engine(loaded, attention_backend="triton", max_num_seqs=2, block_size=4)
    runner, found = paged_runner(engine), set()
    forward = runner.forward

    def count(batch) -> torch.Tensor:
        longest = int(batch.positions.max()) + 1
        with CountMerges() as mode:
            logits = forward(batch)
        found.add((longest, mode.num_merges))
        return logits

    runner.forward = count
    prompt = max((p for p in random_oracle.prompts if len(p) < 16), key=len)
    serve(engine, random_oracle, [random_oracle.prompts.index(prompt)], 20 - len(prompt))
    num_layers = len(loaded.model.layers)
    assert found == {(n, num_layers * (n > 16)) for n in range(len(prompt), 20)}
    assert num_replays(engine) == 19 - len(prompt)


def test_steps_with_guesses_are_computed_without_a_graph(oracle, loaded, caplog) -> None:
    """They have more rows than requests. The other decode steps are replayed. Both are said."""
    with caplog.at_level(logging.WARNING):
        how = {"method": "ngram", "min_ngram": 1, "adaptive": False}
        engine = graph_engine(loaded, speculative=how, max_num_seqs=2)
    assert caplog.text.count("steps with draft tokens run without graphs") == 1
    runner, rows = paged_runner(engine), {True: set(), False: set()}
    forward = runner.forward

    def spy(batch):
        is_replayed = isinstance(batch.attention[0], ReplayMetadata)
        rows[is_replayed].add(bool(batch.sampling.drafts))
        return forward(batch)

    runner.forward = spy
    serve(engine, oracle, [4, 7, 1], max_tokens=24)
    assert engine.stats().num_drafted_tokens > 0
    assert rows == {True: {False}, False: {False, True}}


# -- who has graphs


def test_who_wants_graphs() -> None:
    cuda = torch.device("cuda")
    assert EngineConfig().wants_graphs(cuda) and not EngineConfig().wants_graphs(CPU)
    assert not EngineConfig(enforce_eager=True).wants_graphs(cuda)
    assert EngineConfig(emulate_graphs=True).wants_graphs(CPU)
    with pytest.raises(ValueError, match=r"emulate_graphs must .*enforce_eager, got True"):
        EngineConfig(emulate_graphs=True, enforce_eager=True)
    for name in ("enforce_eager", "emulate_graphs"):
        with pytest.raises(ValueError, match=f"{name} must .*False, True, got 1"):
            EngineConfig(**{name: 1})


def model_on(device: torch.device, **sizes: int) -> SimpleNamespace:
    """What is asked of a model."""
    weight, collectives = SimpleNamespace(device=device), SimpleNamespace(ranks=Ranks(**sizes))
    sizes = {"num_parameters": 9, "groups": deal_layers([None], 9)}
    return SimpleNamespace(embed_weight=weight, collectives=collectives, **sizes)


def local_with(config: EngineConfig, model: Any, backend: Any, is_triton: bool) -> Any:
    """What is asked of the runner's parts."""
    attention = SimpleNamespace(backend=backend, is_triton=is_triton)
    limits, loaded = Limits(100, 97, ()), SimpleNamespace(model=model)
    parts = {"loaded": loaded, "attention": attention, "limits": limits, "adapters": None}
    return SimpleNamespace(config=config, **parts)


@pytest.mark.parametrize(
    "config, ranks, why",
    [
        ({"batch_invariant": True}, {}, "batch_invariant=True"),
        ({"compile": True}, {}, "compiled code"),
        ({"attention_backend": "torch", "emulate_graphs": False}, {}, "planned on the host"),
        ({}, {"pipeline_parallel_size": 2}, "a stage waits for the stage before it"),
        ({}, {"tensor_parallel_size": 2}, "the emulator cannot capture"),
    ],
)
def test_what_has_no_graphs_is_announced(config, ranks, why, caplog) -> None:
    """The last one on a GPU, where attention in PyTorch is a fallback."""
    device = torch.device("cuda" if "attention_backend" in config else "cpu")
    model = model_on(device, **ranks)
    settings = EngineConfig(**{"emulate_graphs": True} | config)
    with caplog.at_level(logging.WARNING):
        assert assembly.make_graph_maker(local_with(settings, model, None, False)) is None
    assert len(caplog.records) == 1 and why in caplog.text


def test_a_gpu_has_graphs_whatever_is_compiled_on_a_cpu(caplog) -> None:
    model = model_on(torch.device("cuda"))
    for config in ({}, {"compile": True}, {"enforce_eager": True}):
        local = local_with(EngineConfig(**config), model, "kernels", True)
        maker = assembly.make_graph_maker(local)
        assert (maker is None) == ("enforce_eager" in config)
        assert maker is None or maker.backend == "kernels"
    assert not caplog.records


def test_what_cannot_be_captured_is_announced_once(oracle, loaded, monkeypatch, caplog) -> None:
    """And served all the same, without graphs."""

    def plan(self, metadata, num_heads, key_cache):
        assert metadata.seq_lens.max().item() >= 0

    monkeypatch.setattr(TensorAttentionBackend, "plan", plan)
    with caplog.at_level(logging.WARNING):
        engine = graph_engine(loaded)
        maker = GraphMaker(engine.config, loaded.model, TensorAttentionBackend(), 100)
        assert maker(engine.kv_cache) is None and maker(engine.kv_cache) is None
    message = "decode steps run without graphs: item synchronizes with the device"
    assert caplog.text.count(message) == 2  # the engine's, and this one's
    assert num_replays(engine) == 0
    serve(engine, oracle, [0, 3], max_tokens=4)
