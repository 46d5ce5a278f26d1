"""The engine with the kernels in place of the PyTorch rules. (Here, not in `common`: this folder's
`conftest.py` switches Triton's interpreter on before anything imports Triton.)"""

from __future__ import annotations

import pytest
import torch

from common.assembly import assembly
from common.engine import EngineConfig, LLMEngine
from common.models.loader import load_model
from common.tests.engine_oracle import (
    make_oracle,
    paged_runner,
    random_prompts,
    save_random_model,
    serve,
)
from request import SamplingParams


@pytest.mark.needs("triton")
def test_the_engine_says_the_same_with_kernels(tmp_path, monkeypatch, device):
    """Greedy against the oracle, and without a seed token for token what the PyTorch rule gives."""
    from rejection_sampler_triton import rejection_sample_triton

    save_random_model(tmp_path)
    oracle = make_oracle(tmp_path, random_prompts(4, vocab_size=97, longest=9, seed=0))
    target, draft = (load_model(tmp_path, torch.float64, device) for _ in range(2))
    weight = draft.model.lm_head.weight
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    weight.data += 0.3 * weight.std() * noise.to(device)
    make, tokens = assembly.make_verifier, []
    speculative = {"method": "draft", "num_spec_tokens": 2, "adaptive": False}
    config = EngineConfig(num_blocks=100, attention_backend="torch", speculative=speculative)
    for choice in (False, True):
        make_with = lambda *args, choice=choice: make(*args[:-1], choice)  # noqa: E731
        monkeypatch.setattr(assembly, "make_verifier", make_with)
        engine = LLMEngine(config, loaded=target, draft=draft)
        assert (paged_runner(engine).sampler.reject is rejection_sample_triton) == choice
        serve(engine, oracle, [0, 1, 2], 8)
        params = SamplingParams(temperature=0.8, max_tokens=8)
        outputs = engine.generate_batch(oracle.prompts[:3], params)
        tokens.append([output.outputs[0].token_ids for output in outputs.values()])
        stats = engine.stats()
        assert 0 < stats.num_accepted_tokens < stats.num_drafted_tokens
    assert tokens[0] == tokens[1]
