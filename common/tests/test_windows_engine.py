"""Layers that attend to a window, beyond the rows of `claims.py`: a draft model, recorded runs,
counted slots, backends, and what is refused. Slots that were not written are NaN, the null block's
too."""

from __future__ import annotations

import json
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import decode_attention
from cached_kv_cache_manager import CachedKVCacheManager
from common.engine import LLMEngine
from common.engine_config import ATTENTION_BACKENDS, SHIPPED_CHECKPOINT, EngineConfig
from common.llm import LLM
from common.models.loader import LoadedModel, load_model
from common.serve.kv_events import KVEvents
from common.tests.claims import NARROW, drawn
from common.tests.engine_oracle import (
    MAX_TOKENS,
    Oracle,
    checked_engine,
    full_of_nan,
    paged_runner,
    serve,
    serve_a_crowd,
)
from common.tests.film_runs import RecordedRun, check_film
from common.tests.film_runs import serve as record_run
from common.tests.small_models import WINDOWED, Subject, subject
from compiled_attention import HeadMajorKVCache
from grouped_kv_memory import max_blocks
from paged_attention import TorchAttentionBackend
from request import SamplingParams
from test_every_attention import PlainAttention
from tiered_cache import KVTierConfig
from window_attention import WindowBackend
from workshop.watch.replay.film import Film

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=WINDOWED)
def which(request: pytest.FixtureRequest) -> Subject:
    return subject(request.param)


@pytest.fixture
def windowed(which: Subject) -> tuple[Oracle, LoadedModel]:
    return which.oracle, which.loaded


@pytest.mark.sample(seed=2)
@pytest.mark.parametrize("seed", range(8))
def test_a_draft_model_guesses_what_it_says_alone(seed: int, which: Subject, tmp_path) -> None:
    """It has the target's weights and no windows. Its keys lie where those of layers do that see
    everything; its memory is full of NaN, too."""
    oracle, loaded = which.oracle, which.loaded
    if None not in loaded.config.layer_windows:
        pytest.skip("such a model has none: it is refused")
    path = shutil.copytree(loaded.path, tmp_path / "draft")
    fields = json.loads((path / "config.json").read_text())
    fields |= {"use_sliding_window": False, "layer_types": None}
    (path / "config.json").write_text(json.dumps(fields))
    rng, draft = random.Random(seed), load_model(path, torch.float64, torch.device("cpu"))
    how = {"method": "draft", "num_spec_tokens": 3, "adaptive": False}
    settings = NARROW | {"speculative": how, "overlap_scheduling": False}
    engine = checked_engine(loaded, draft, **drawn(settings, rng, seed, which))
    proposer, guesses = full_of_nan(engine).speculation.proposer.proposer, []
    propose = proposer.propose

    def spy(inputs, num_drafts):
        known = {f.request.req_id: f.request.tokens(0, f.request.num_tokens) for f in inputs}
        found = propose(inputs, num_drafts)
        guesses.extend((known[name], tokens) for name, tokens in found.items() if tokens)
        return {name: list(tokens) for name, tokens in found.items()}

    proposer.propose = spy
    serve_a_crowd(engine, oracle, rng, seed, num_requests=rng.randint(2, 8))
    engine.close()
    alone = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    longest = sorted(guesses, key=lambda guess: -len(guess[0]))
    for known, tokens in longest[:10] + rng.sample(guesses, min(10, len(guesses))):
        logits = alone(torch.tensor([[*known, *tokens]])).logits[0]
        assert logits[len(known) - 1 : -1].argmax(-1).tolist() == list(tokens)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each call of compiled attention."""
    numbers: list[int] = []
    real = decode_attention.CompiledRows.__call__

    def counted(self, query, key_cache, value_cache, rows, *rest) -> None:
        numbers.append(len(rows.tokens))
        real(self, query, key_cache, value_cache, rows, *rest)

    monkeypatch.setattr(decode_attention.CompiledRows, "__call__", counted)
    return numbers


@pytest.mark.needs("C++ compiler")
@pytest.mark.parametrize("chunked_prefill", [False, 16])
def test_decodes_are_compiled(chunked_prefill, windowed, calls: list[int]) -> None:
    """Those of every layer, whatever it sees."""
    oracle, loaded = windowed
    sizes = dict(max_model_len=150, block_size=4, chunked_prefill=chunked_prefill)
    engine = full_of_nan(checked_engine(loaded, compile=True, **sizes))
    assert isinstance(engine.kv_cache, HeadMajorKVCache)
    serve(engine, oracle, [0, 1, 2], 8)
    assert max(calls) > 1 and len(calls) >= 7 * loaded.model.num_layers
    engine.close()


def draw_config(rng: random.Random, oracle: Oracle, loaded: LoadedModel) -> dict:
    block_size, most = rng.choice([1, 3, 4, 16]), rng.choice([8, 64, 200])
    whole = most == 200 and rng.random() < 0.5
    loaded.model.group_layers(256)
    longest = max(map(len, oracle.prompts)) + MAX_TOKENS
    speculates = rng.random() < 0.3
    overlaps = not speculates and rng.random() < 0.3
    in_flight = most * (2 if overlaps else 1)  # tokens, when blocks are asked for
    largest = max_blocks(longest, block_size, loaded.model.groups.windows, in_flight)
    return dict(
        block_size=block_size,
        num_blocks=1 + rng.choice([largest, largest + 1, 2 * largest, 20 * largest]),
        max_num_seqs=rng.choice([1, 3, 16]),
        max_num_batched_tokens=most,
        chunked_prefill=not whole,
        speculative={"method": "ngram", "num_spec_tokens": 3} if speculates else None,
        overlap_scheduling=overlaps,
        policy=rng.choice(["fcfs", "priority", "lof", "lpm", "dfs-weight"]),
        watermark=rng.choice([0.0, 0.1]),
        preempt_every=rng.choice([None, 2, 5]),
        shuffle_batch=rng.random() < 0.5,
        prefix_cache=rng.choice([None, "hash"]),
    )


@pytest.mark.sample(seed=4)
@pytest.mark.parametrize("first_step", [0, 4])
@pytest.mark.parametrize("seed", range(20))
def test_a_film_is_the_engine_whenever_it_begins(
    seed: int, first_step: int, which: Subject, tmp_path: Path
) -> None:
    """Tables of all groups, the free order, and what of which group can be found."""
    config = draw_config(random.Random(seed), which.oracle, which.loaded)
    path, prompts = tmp_path / "run.jsonl", which.oracle.prompts
    check_film(record_run(path, which.loaded, None, prompts, seed, first_step=first_step, **config))


def test_a_film_that_begins_late_knows_what_can_be_found(
    windowed: tuple[Oracle, LoadedModel], tmp_path: Path
) -> None:
    """And who waits for the block that another computes."""
    oracle, loaded = windowed
    sizes = dict(num_blocks=400, block_size=2, max_num_batched_tokens=64, max_num_seqs=4)
    engine = checked_engine(loaded, **sizes)
    index = max(range(len(oracle.prompts)), key=lambda i: len(oracle.prompts[i]))
    serve(engine, oracle, [index], 4)
    recorded = RecordedRun(tmp_path / "run.jsonl")
    engine.watch(recorded.path)
    recorded.look(engine)
    recorded_late = recorded.frame
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    for names in ("ab", "c"):  # the last publishes alone, step after step, for another tenant
        for name in names:
            tenant = {"cache_salt": "c"} if name == "c" else {}
            engine.add_request(name, [*oracle.prompts[index], 1, 2, 3, 4], params, **tenant)
        while engine.has_unfinished_requests():
            engine.step()
            recorded.look(engine)
    engine.close()
    check_film(recorded)
    steps = list(Film.read(recorded.path).steps())
    plans = [plan for step in steps for plan in step.plans]
    assert plans[0]["parents"] == {"b": "a"}
    cached, tables = (recorded_late["cached"], steps[0].state["tables"]["a"])
    for group, window in enumerate(loaded.model.groups.windows):
        most = len(oracle.prompts[index]) // 2
        wanted = most if window is None else min(most, window // 2)  # ceil((window - 1) / 2)
        assert sum(str(block) in cached for block in tables[str(group)]) == wanted


@pytest.mark.slow  # processes
def test_two_ranks_have_the_tables_of_one(windowed: tuple[Oracle, LoadedModel]) -> None:
    """A second time from the prefix cache."""
    oracle, loaded = windowed
    assert loaded.path is not None
    for tokenizer in Path(SHIPPED_CHECKPOINT).glob("tokenizer*"):
        shutil.copy(tokenizer, loaded.path)
    sizes = {"num_blocks": 90, "block_size": 4, "max_num_batched_tokens": 7, "max_num_seqs": 3}
    llm = LLM(str(loaded.path), dtype="float64", tensor_parallel_size=2, **sizes)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    for _ in range(2):
        for index, output in enumerate(llm.generate(oracle.prompts[:4], params, use_tqdm=False)):
            assert output.outputs[0].token_ids == oracle.expected(index, 6)
    assert llm.engine.stats().cached_tokens > 0


def test_up_to_the_window_nothing_is_different(windowed: tuple[Oracle, LoadedModel]) -> None:
    oracle, loaded = windowed
    window = min(w for w in loaded.config.layer_windows if w is not None)
    engine = checked_engine(loaded, max_model_len=window, num_blocks=40, block_size=2)
    assert type(engine.kv_manager) is CachedKVCacheManager
    assert loaded.model.groups.windows == (None,)
    index = min(range(len(oracle.prompts)), key=lambda i: len(oracle.prompts[i]))
    serve(engine, oracle, [index], window - len(oracle.prompts[index]))
    engine.close()


def test_slots_that_are_written_are_counted_in_every_group(windowed) -> None:
    """Those of the blocks that are held, which are no longer NaN: exactly in decodes."""
    oracle, loaded = windowed
    sizes = dict(block_size=4, num_blocks=200, max_num_batched_tokens=16, prefix_cache=None)
    engine = full_of_nan(checked_engine(loaded, **sizes))
    engine.add_request("a", oracle.prompts[2], SamplingParams(temperature=0, max_tokens=MAX_TOKENS))
    shares = []
    while engine.has_unfinished_requests():
        engine.step()
        record, tables = engine.recorder.record(), engine.kv_manager.get_tables("a")
        if not engine.has_unfinished_requests():
            break  # and its blocks are free
        ids = [[block_id for block_id in table if block_id] for table in tables]
        of_groups = [engine.kv_cache.key_cache[0][table] for table in ids]
        num_held = sum(len(keys) for keys in of_groups)
        num_written_slots = sum(int((~keys[..., 0, 0].isnan()).sum()) for keys in of_groups)
        num_tokens = sum(record.num_scheduled_tokens.values())
        starts = list(record.start_positions.values())
        found = engine.kv_manager.num_written_slots(starts, num_tokens)
        num_unsure = 0 if num_tokens == 1 and starts[0] >= 64 else len(tables) * 4
        assert abs(found - num_written_slots) <= num_unsure, starts
        assert record.kv_blocks_in_use == num_held
        shares.append(1 - found / (4 * num_held))
    waste = engine.stats().kv_waste * (len(shares) + 1)
    assert 0 <= waste - sum(shares) < 0.5, "the last step's is not in the sum"
    engine.close()


def test_a_backend_of_ones_own_computes_what_sees_everything(windowed) -> None:
    oracle, loaded = windowed

    class Own(TorchAttentionBackend):
        num_plans = 0

        def plan(self, *arguments):
            self.num_plans += 1
            return super().plan(*arguments)

    backend = Own()
    engine = full_of_nan(checked_engine(loaded, attention_backend=backend, max_model_len=150))
    serve(engine, oracle, [2, 3, 4], MAX_TOKENS)
    assert (backend.num_plans > 1) is (None in loaded.model.groups.windows)
    engine.close()


class SeesEverything:
    """A backend that does not read `metadata.window`."""

    def plan(self, metadata, *rest):
        return TorchAttentionBackend().plan(replace(metadata, window=None), *rest)


@pytest.mark.parametrize("chunked_prefill", [False, 8])
@pytest.mark.parametrize("kind", [PlainAttention, SeesEverything])
def test_a_new_backend_is_one_class_and_one_row(
    kind, chunked_prefill, windowed, monkeypatch
) -> None:
    """Nothing else knows its name. It computes every group of queries, with a window too if it
    derives from chapter 2's."""
    oracle, loaded = windowed
    where = f"{kind.__module__}:{kind.__name__}"
    monkeypatch.setitem(ATTENTION_BACKENDS, "plain", (where, where))
    engine = checked_engine(
        loaded, attention_backend="plain", chunked_prefill=chunked_prefill, max_model_len=150
    )
    full_of_nan(engine)
    serve(engine, oracle, [2, 3, 4], MAX_TOKENS)
    backend = paged_runner(engine).backend
    assert type(backend) is (PlainAttention if kind is PlainAttention else WindowBackend)
    engine.close()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"prefix_cache": "radix"}, "prefix_cache='radix'"),
        ({"scheduler": "fcfs"}, "scheduler='fcfs'"),
        ({"scheduler": "prefill_first"}, "scheduler='prefill_first'"),
        ({"kv_tiers": KVTierConfig(host_blocks=2)}, "kv_tiers"),
        ({"speculative": {"method": "draft", "model": "tiny"}}, 'speculative other than "ngram"'),
    ],
)
def test_what_is_not_built_is_refused_by_name(settings, named) -> None:
    loaded = subject("all windows").loaded
    config = EngineConfig(num_blocks=40, **settings)
    with pytest.raises(ValueError, match=re.escape(named)) as error:
        LLMEngine(config, loaded=loaded, draft=loaded if "speculative" in settings else None)
    assert "max_model_len=7" in str(error.value)


def test_so_are_kv_events_of_an_engine_that_is_watched_too(windowed, tmp_path) -> None:
    engine = checked_engine(windowed[1], num_blocks=40)
    for is_watched in (False, True):
        if is_watched:
            engine.watch(tmp_path / "run.jsonl")
        with pytest.raises(ValueError, match="kv_events is not supported for layers"):
            KVEvents(engine, "nowhere")
    engine.close()
