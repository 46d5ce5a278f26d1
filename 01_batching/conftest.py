"""A tiny random model for this chapter's tests: no checkpoint, float64, and varied output."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache

import pytest
import torch

# transformers imports Triton, which decides at that moment whether later chapters' kernels are
# interpreted.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config
from transformers import Qwen3ForCausalLM as Qwen3

from common.tests.engine_oracle import greedy

VOCAB_SIZE = 61
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    # With a smaller range, outputs are constant and positions would not matter.
    "initializer_range": 0.6,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


@pytest.fixture(scope="session")
def qwen3() -> PreTrainedModel:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return Qwen3(Qwen3Config(head_dim=8, **SIZES)).to(torch.float64).eval()


@pytest.fixture(scope="session")
def llama() -> PreTrainedModel:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).to(torch.float64).eval()


@pytest.fixture(scope="session")
def oracle():
    """`oracle(model, prompt, num_tokens)`: the greedy continuation by transformers' own `generate`,
    ignoring end of text. Greedy output is prefix-consistent, so one run answers for all lengths."""
    longest = 24
    known = cache(lambda model, prompt: greedy(model, list(prompt), longest))

    def continuation(model: PreTrainedModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
        assert num_tokens <= longest
        return known(model, tuple(prompt))[:num_tokens]

    return continuation
