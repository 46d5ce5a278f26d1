"""The oracle of the engine's tests: greedy continuations by `transformers`, in float64, computed
once; and engines that are compared with it.

Greedy decoding is prefix-consistent: the continuation for `max_tokens=5` is the first five tokens
of the one for 24. So one table of long continuations answers for every workload drawn from its
prompts."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen3Config

from bounded_loops import as_long_as
from common.engine import EngineConfig, LLMEngine
from common.models.loader import LoadedModel
from common.requests.output_processor import RequestOutput
from common.requests.tokenizer import Tokenizer
from common.runner.model_runner import PagedModelRunner
from common.tests.model_cases import by_transformers, tiny_config
from request import SamplingParams

MAX_TOKENS = 24


@dataclass(frozen=True)
class Oracle:
    """`continuations[i]` are the `MAX_TOKENS` tokens that follow `prompts[i]`, end of text
    ignored."""

    path: Path
    prompts: list[list[int]]
    continuations: list[list[int]]

    def expected(self, index: int, max_tokens: int, stop_ids: Iterable[int] = ()) -> list[int]:
        """Up to `max_tokens`, cut behind the first of `stop_ids`."""
        tokens = self.continuations[index][:max_tokens]
        for i, token in enumerate(tokens):
            if token in set(stop_ids):
                return tokens[: i + 1]
        return tokens


def save_random_model(
    path: Path, seed: int = 0, kind: type[PreTrainedConfig] = Qwen3Config, **fields: object
) -> None:
    """A model whose greedy output is lively: an almost constant one would hide wrong positions."""
    torch.manual_seed(seed)
    sizes = dict(vocab_size=97, intermediate_size=48, num_hidden_layers=2, num_key_value_heads=2)
    sizes |= dict(head_dim=16, max_position_embeddings=256, initializer_range=0.6)
    config = tiny_config(kind, **sizes | dict(tie_word_embeddings=False) | fields)
    AutoModelForCausalLM.from_config(config).to(torch.float64).save_pretrained(path)


def random_prompts(num_prompts: int, vocab_size: int, longest: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    lengths = [1, 2, longest, *(rng.randint(1, longest) for _ in range(num_prompts - 3))]
    return [[rng.randrange(vocab_size) for _ in range(n)] for n in lengths]


@torch.inference_mode()
def greedy(model: torch.nn.Module, prompt: list[int], max_tokens: int) -> list[int]:
    """`transformers`' own `generate`, end of text ignored."""
    ids = torch.tensor([prompt])
    how = dict(do_sample=False, eos_token_id=None, pad_token_id=0)
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=max_tokens, **how)
    return out[0, len(prompt) :].tolist()


def make_oracle(path: Path, prompts: list[list[int]]) -> Oracle:
    model = by_transformers(path, torch.float64)
    model.generation_config.eos_token_id = None
    return Oracle(path, prompts, [greedy(model, prompt, MAX_TOKENS) for prompt in prompts])


def family_prompts(seed: int, vocab_size: int = 97) -> list[list[int]]:
    """System prompts, with few-shot parts and questions behind them: beginnings of every length are
    shared, exact multiples of 16 among them."""
    rng = random.Random(seed)

    def tokens(n: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(n)]

    systems = [tokens(n) for n in (16, 33, 48)]
    shots = [tokens(n) for n in (1, 15, 16)]
    prompts = [list(system) for system in systems]
    for system in systems:
        for shot in shots:
            prompts.append(system + shot)
            prompts.append(system + shot + tokens(rng.randint(1, 20)))
    prompts += [prompts[5][:-1], prompts[5][1:], shots[2] + systems[0], tokens(32)]
    return prompts


def greedy_params(max_tokens: int, n: int = 1) -> SamplingParams:
    return SamplingParams(n=n, temperature=0, max_tokens=max_tokens, ignore_eos=True)


def checked_engine(
    loaded: LoadedModel,
    draft: LoadedModel | None = None,
    tokenizer: Tokenizer | None = None,
    **config: Any,
) -> LLMEngine:
    """An engine that checks itself after every step."""
    config = EngineConfig(**{"check_invariants": True} | config)
    return LLMEngine(config, loaded=loaded, draft=draft, tokenizer=tokenizer)


def full_of_nan(engine: LLMEngine) -> LLMEngine:
    """Its KV memory, the draft model's and the null blocks too: each read of a slot that was not
    written shows."""
    runner = engine.core.runner
    proposer = getattr(runner, "proposer", None)
    while not isinstance(runner, PagedModelRunner) and not hasattr(runner, "stages"):
        runner = getattr(runner, "inner", None) or runner.runner  # pyright: ignore
    owners = [stage.local for stage in getattr(runner, "stages", ())] or [runner]
    for owner in (*owners, proposer):
        if (kv_cache := getattr(owner, "kv_cache", None)) is not None:
            for cache in (*kv_cache.key_cache, *kv_cache.value_cache):
                cache.fill_(math.nan)
    return engine


def finish(engine: LLMEngine) -> dict[str, RequestOutput]:
    """Step until nobody is left. What ended on the way, by id, in order."""
    outputs: dict[str, RequestOutput] = {}
    for _ in as_long_as(engine.has_unfinished_requests, max_rounds=500):
        outputs |= {o.request_id: o for o in engine.step() if o.finished}
    return outputs


def with_noise(model: LoadedModel) -> LoadedModel:
    """Its last matrix is spoiled: as a draft model it is right about two times in three."""
    weight = model.model.lm_head.weight
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    weight.data += 0.35 * weight.std() * noise.to(weight.device)
    return model


def serve_a_crowd(
    engine: LLMEngine,
    oracle: Oracle,
    rng: random.Random,
    seed: int,
    *,
    num_requests: int = 16,
    abort_share: float = 0.2,
    salts: Sequence[str | None] = (),
    eos: Sequence[int] = (),
) -> list[RequestOutput]:
    """Requests that come when they like, some with three samples; of the ends of text `eos`, half
    of them take no notice. Checks every token, why each ended, and that nothing is held then."""
    capacity = engine.kv_manager.capacity
    names = list(map(str, range(num_requests)))
    arrivals = {name: (rng.randint(0, 40), rng.randrange(len(oracle.prompts))) for name in names}
    short = {name: rng.randint(1, 2) for name in names if rng.random() < 0.25}
    lengths = {name: short.get(name, rng.randint(1, MAX_TOKENS)) for name in names}
    aborts = {name: rng.randint(0, 60) for name in names if rng.random() < abort_share}
    ends = {name: eos if rng.random() < 0.5 else () for name in names}
    outputs: dict[str, RequestOutput] = {}
    for step in range(4000):
        for name, (when, index) in arrivals.items():
            if when == step:
                params = greedy_params(lengths[name], n=rng.choice([1, 1, 1, 3]))
                params = replace(params, ignore_eos=not ends[name])
                salt = rng.choice(salts) if salts else None
                how = {"priority": rng.randint(0, 3), "cache_salt": salt}
                engine.add_request(name, oracle.prompts[index], params, **how)
        for name, when in aborts.items():
            if when == step and (output := engine.abort_request(name)) is not None:
                outputs[name] = output
        outputs |= {o.request_id: o for o in engine.step() if o.finished}
        if step > 40 and not engine.has_unfinished_requests():
            break
    assert outputs.keys() == arrivals.keys(), f"seed {seed}: it does not end"
    for name, (_, index) in arrivals.items():
        room = capacity - len(oracle.prompts[index]) + 1  # the last token needs no slot
        expected = oracle.expected(index, min(lengths[name], room), ends[name])
        reason = "stop" if expected[-1] in ends[name] else "length"
        for completion in outputs[name].outputs:
            is_cut = name in aborts and completion.finish_reason == "abort"
            known = expected[: len(completion.token_ids)] if is_cut else expected
            assert completion.token_ids == known, f"seed {seed}, request {name}"
            assert is_cut or completion.finish_reason == reason, f"seed {seed}, request {name}"
    assert engine.stats().kv_blocks_in_use == 0
    return list(outputs.values())


def serve(engine, oracle: Oracle, indices: list[int], max_tokens: int, salt=None):
    """All of them at once. Checks every token; returns the outputs."""
    prompts = [oracle.prompts[i] for i in indices]
    outputs = engine.generate_batch(prompts, greedy_params(max_tokens), cache_salt=salt)
    for i, output in zip(indices, outputs.values(), strict=True):
        assert output.outputs[0].token_ids == oracle.expected(i, max_tokens), f"prompt {i}"
    return list(outputs.values())


def paged_runner(engine) -> PagedModelRunner:
    """The innermost runner, whatever is wrapped around it."""
    runner = engine.core.runner
    for _ in range(3):
        if isinstance(runner, PagedModelRunner):
            return runner
        runner = runner.runner
    raise AssertionError(f"no PagedModelRunner inside {engine.core.runner!r}")


def spoil_kv(engine, request_id: str, index: int = 0) -> None:
    """After the first forward pass for the request, block `index` of its KV is NaN: the next one
    that reads it ends in an error, as it would on a device that computes wrong."""
    runner = paged_runner(engine)
    blocks = engine.kv_manager
    forward = runner.forward

    def spoiled(batch):
        logits = forward(batch)
        if block_ids := blocks.get_block_ids(request_id):
            runner.forward = forward
            engine.kv_cache.value_cache[0][block_ids[index]] = math.nan
        return logits

    runner.forward = spoiled


def num_replays(engine) -> int:
    """Steps so far that were replayed from a graph."""
    graphs = getattr(paged_runner(engine), "graphs", None)
    return 0 if graphs is None else graphs.num_replays
