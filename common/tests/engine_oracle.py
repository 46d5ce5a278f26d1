"""The oracle of the engine's tests: greedy continuations by `transformers`, in float64, computed
once.

Greedy decoding is prefix-consistent: the continuation for `max_tokens=5` is the first five tokens
of the one for 24. So one table of long continuations answers for every workload drawn from its
prompts."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from common.runner.model_runner import PagedModelRunner
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


def save_random_model(path: Path, seed: int = 0) -> None:
    """A model whose greedy output is lively: an almost constant one would hide wrong positions."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        initializer_range=0.6,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    Qwen3ForCausalLM(config).to(torch.float64).save_pretrained(path)


def random_prompts(num_prompts: int, vocab_size: int, longest: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    lengths = [1, 2, longest, *(rng.randint(1, longest) for _ in range(num_prompts - 3))]
    return [[rng.randrange(vocab_size) for _ in range(n)] for n in lengths]


@torch.inference_mode()
def greedy(model: torch.nn.Module, prompt: list[int], max_tokens: int) -> list[int]:
    """`transformers`' own `generate`, end of text ignored."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


def make_oracle(path: Path, prompts: list[list[int]]) -> Oracle:
    model = Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
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


def serve(engine, oracle: Oracle, indices: list[int], max_tokens: int, salt=None):
    """All of them at once. Checks every token; returns the outputs."""
    prompts = [oracle.prompts[i] for i in indices]
    outputs = engine.generate_batch(prompts, greedy_params(max_tokens), salt)
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
