"""The small models of the engine's tests, each with its prompts and what `transformers` says of
them in float64. `subject(name)` makes one, once in a process."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path

import torch
from transformers import Gemma3TextConfig, MistralConfig, Olmo3Config, Qwen2Config, Qwen3MoeConfig

from common.engine_config import SHIPPED_CHECKPOINT, SHIPPED_DRAFT
from common.models.loader import LoadedModel, load_model
from common.requests.tokenizer import Tokenizer, load_tokenizer
from common.tests.adapter_cases import KINDS, OF_ATTENTION, by_peft, save_adapter, with_peft
from common.tests.engine_oracle import (
    MAX_TOKENS,
    Oracle,
    family_prompts,
    make_oracle,
    random_prompts,
    save_random_model,
    with_noise,
)
from common.tests.grammar_cases import CASES, greedy_within, small_tokenizer
from common.tests.model_cases import F, W

CPU = torch.device("cpu")
EXPERTS = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24)
# No sequence is longer than this window, so nothing is refused because of it. OLMo 3 has a window
# that hides most of a prompt.
TWO_KINDS = dict(layer_types=[W, F], sliding_window=256)
LAST_TWO = dict(sliding_window=5, layer_types=[F, W, W], num_hidden_layers=3)
TURNS = dict(sliding_window=12, layer_types=[W, F, W, F, W], num_hidden_layers=5)

# Lengths of prompts, and where each parts from the longest one: at 0, it is a prefix of it.
LENGTHS = ((1, 2, 16, 33, 49, 97), (0, 0, 0, 0, 33, 40))
FEWER = ((1, 5, 16, 33, 40), (0, 0, 0, 0, 20))


def sharing(lengths: tuple[int, ...], parts_at: tuple[int, ...], vocab_size: int = 97) -> list:
    """Prompts that share beginnings. Half of the tokens are a phrase that returns, so that n-gram
    lookup finds something."""
    rng = random.Random(7)
    phrase = [rng.randrange(2, vocab_size) for _ in range(5)]

    def tokens(n: int) -> list[int]:
        text: list[int] = []
        while len(text) < n:
            text += [*phrase, *(rng.randrange(2, vocab_size) for _ in range(5))]
        return text[:n]

    trunk = tokens(max(lengths))
    prompts = []
    for length, parted in zip(lengths, parts_at, strict=True):
        common = parted or length
        prompts.append(trunk[:common] + tokens(length - common))
    return prompts


def shipped_prompts() -> list[list[int]]:
    return sharing(*FEWER, load_model(SHIPPED_CHECKPOINT, torch.float64, CPU).config.vocab_size)


def shipped_texts() -> list[list[int]]:
    texts = [
        "def fibonacci(n):",
        "class Stack:",
        "import os\n",
        "#",
        "def read(path, mode='r'):\n    with open(path, mode) as f:\n        return",
        "for i in range(10):\n    print(",
        'def f(x):\n    """Return the square of x."""\n',
        "try:\n    import threading\nexcept ImportError:\n",
    ]
    return [load_tokenizer(SHIPPED_CHECKPOINT).encode(text) for text in texts]


save = partial(save_random_model, seed=3)
# What saves the checkpoint, or a shipped one, and the prompts.
MODELS: dict[str, tuple[Callable | Path, Callable[[], list[list[int]]]]] = {
    # of the matrix
    "random": (save, partial(sharing, *LENGTHS)),
    "experts": (partial(save, kind=Qwen3MoeConfig, **EXPERTS), partial(sharing, *FEWER)),
    "gemma3": (
        partial(save, kind=Gemma3TextConfig, query_pre_attn_scalar=9, **TWO_KINDS),
        partial(sharing, *FEWER),
    ),
    "olmo3": (
        partial(save, kind=Olmo3Config, **TWO_KINDS | dict(sliding_window=10)),
        partial(sharing, *FEWER),
    ),
    # windows in some layers, fewer groups than layers, and in all
    "turns": (
        partial(save, kind=Qwen2Config, use_sliding_window=True, **TURNS),
        partial(sharing, *FEWER),
    ),
    "one in three": (partial(save, use_sliding_window=True, **LAST_TWO), partial(sharing, *FEWER)),
    "windows": (partial(save, kind=MistralConfig, sliding_window=7), partial(sharing, *FEWER)),
    "shipped": (SHIPPED_CHECKPOINT, shipped_prompts),
    "shipped texts": (SHIPPED_CHECKPOINT, shipped_texts),
    "draft's texts": (SHIPPED_DRAFT, shipped_texts),  # a fourth of the time
    # prompts that share nothing, and families of them (chapter 3)
    "unrelated": (
        partial(save, seed=0),
        partial(random_prompts, 24, vocab_size=97, longest=40, seed=0),
    ),
    "family": (partial(save, seed=1), partial(family_prompts, seed=2)),
}


@dataclass(frozen=True, eq=False)
class Subject:
    """A model, its draft model and prompts, and what follows the prompts: without adapters, and
    with the prompt's own of `adapters`."""

    oracle: Oracle
    loaded: LoadedModel
    tokenizer: Tokenizer  # for grammars

    @cached_property
    def draft(self) -> LoadedModel:
        if self.oracle.path == SHIPPED_CHECKPOINT:
            return load_model(SHIPPED_DRAFT, torch.float64, CPU)
        return with_noise(load_model(self.oracle.path, torch.float64, CPU))

    @cached_property
    def in_float32(self) -> LoadedModel:
        return load_model(self.oracle.path, torch.float32, CPU)

    @cached_property
    def ending(self) -> LoadedModel:
        """The model with the tokenizer's EOS, for requests that do not ignore it."""
        return replace(self.loaded, generation_eos_token_ids=(self.tokenizer.eos_token_id,))

    @cached_property
    def adapters(self) -> dict[str, Path]:
        folder = Path(_folder().name) / self.oracle.path.name
        kinds = KINDS if self.loaded.config.experts is None else OF_ATTENTION
        return {n: save_adapter(self.oracle.path, folder / n, **kind) for n, kind in kinds.items()}

    def grammar_of(self, index: int) -> str | None:
        return (None, *CASES)[index % (1 + len(CASES))]

    def adapter_of(self, index: int) -> str | None:
        return (None, *self.adapters)[index % (1 + len(self.adapters))]

    @cached_property
    def adapted(self) -> Oracle:
        prompts = self.oracle.prompts
        found = list(self.oracle.continuations)
        for name, path in self.adapters.items():
            own = [i for i in range(len(prompts)) if self.adapter_of(i) == name]
            tokens = by_peft(self.oracle.path, path, [prompts[i] for i in own], MAX_TOKENS)
            for i, continuation in zip(own, tokens, strict=True):
                found[i] = continuation
        return Oracle(self.oracle.path, prompts, found)

    @cache  # noqa: B019
    def with_adapter(self, name: str | None) -> torch.nn.Module:
        return with_peft(self.oracle.path, None if name is None else self.adapters[name])

    @cache  # noqa: B019
    def within(
        self, adapter: str | None, grammar: str | None, i: int, most: int, limits: str = "none"
    ) -> list[int]:
        """What follows prompt `i` with an adapter and a grammar, by `transformers` and PEFT."""
        model = self.with_adapter(adapter)
        return greedy_within(model, self.tokenizer, self.oracle.prompts[i], grammar, most, limits)


@cache
def subject(name: str) -> Subject:
    """One of `MODELS`, in float64. Takes seconds."""
    how, prompts = MODELS[name]
    if is_shipped := isinstance(how, Path):
        path = how
    else:
        how(path=(path := Path(_folder().name) / name))
    oracle = make_oracle(path, prompts())
    said = {token for tokens in oracle.continuations for token in tokens}
    assert len(said) > 30, "output is too uniform to show a wrong position"
    tokenizer = load_tokenizer(path) if is_shipped else small_tokenizer()
    return Subject(oracle, load_model(path, torch.float64, CPU), tokenizer)


@cache
def _folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="small-models-")
