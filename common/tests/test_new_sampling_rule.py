"""A sampling rule is a field and a row of a table: one that does not exist is added so, in the text
of two files, and sampler, kernels, server, warm-up and workers take it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

from common.tests.forked import Forked

ROOT = Path(__file__).parents[2]
# Top-a keeps tokens at least `top_a` times as probable as the square of the highest probability.
FUNCTION = """
def apply_top_a(logits, top_a):
    probs = logits.softmax(dim=-1)
    lowest = top_a[:, None] * probs.amax(dim=-1, keepdim=True) ** 2
    return logits.masked_fill(probs < lowest, NEG_INF)
"""
ADDED = {  # module, file: what is added behind which line
    ("request", "01_batching/request.py"): {
        "    min_p: float = 0.0\n": "    top_a: float = 0.0\n",
        '    "min_p": ("a finite number in [0.0, 1.0]", 0.0, 1.0),\n': (
            '    "top_a": ("a finite number in [0.0, 1.0]", 0.0, 1.0),\n'
        ),
    },
    ("common.sampling.sampling_rules", "common/sampling/sampling_rules.py"): {
        '    SamplingRule("min_p", 0.15, apply_min_p, is_recommended=True),\n': (
            '    SamplingRule("top_a", 0.4, apply_top_a),\n'
        ),
        "    return logits.masked_fill(logits < lowest, NEG_INF)\n": FUNCTION,
    },
}
KEPT = [  # of probabilities 0.4, 0.3, 0.15, 0.1, 0.05
    (dict(top_a=0.9), 3),  # at least 0.9 * 0.16
    (dict(top_a=0.4, top_k=2), 2),
    (dict(top_a=0.9, top_p=0.5), 2),
    (dict(top_a=0.0), 5),
    (dict(top_a=0.9, temperature=0), 1),
]


def test_a_rule_is_a_field_and_a_row() -> None:
    assert Forked(add_and_use_it).wait(300) == 0


def add_and_use_it() -> None:
    """In a process that has loaded no module of ours yet."""
    for (name, path), changes in ADDED.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        for before, more in changes.items():
            assert text.count(before) == 1, before
            text = text.replace(before, before + more)
        module = sys.modules[name] = ModuleType(name)
        exec(compile(text, path, "exec"), vars(module))
    import pytest
    import torch

    from common.runner.kv_sizing import largest_params
    from common.sampling.sampling_rules import BITS, needs_of
    from common.serve.errors import ApiError
    from common.serve.wire import CompletionBody
    from common.tests.sampling_cases import mixed_sampling, sampling_probs
    from request import SamplingParams

    logits = torch.tensor([[0.4, 0.3, 0.15, 0.1, 0.05]], dtype=torch.float64).log()
    for params, num_kept in KEPT:
        batch = mixed_sampling([SamplingParams(**params)], 1, 5, 0)
        expected = logits.masked_fill(torch.arange(5) >= num_kept, -torch.inf).softmax(-1)
        torch.testing.assert_close(sampling_probs(logits, batch), expected)
        assert bool(batch.batch_needs & BITS["top_a"]) == (1 < num_kept < 5)
    assert CompletionBody(prompt="x", top_a=0.25).params({}) == SamplingParams(top_a=0.25)
    assert CompletionBody.model_json_schema()["properties"]["top_a"]["default"] is None
    said = r"top_a must be a finite number in \[0.0, 1.0\], got 2"
    with pytest.raises(ApiError, match=said):
        CompletionBody(prompt="x", top_a=2).params({})
    assert needs_of(largest_params(60)) & BITS["top_a"]
