"""A sampling rule is a field and a row of a table: a rule that does not exist is added so, in the
text of two files, and sampler, kernels, server, warm-up and workers take it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Top-a keeps tokens at least `top_a` times as probable as the square of the highest probability.
FIELD = "    min_p: float = 0.0\n", "    top_a: float = 0.0\n"
INTERVAL = '    "min_p": ("[0.0, 1.0]", 0.0, 1.0),\n', '    "top_a": ("[0.0, 1.0]", 0.0, 1.0),\n'
ROW = (
    '    SamplingRule("min_p", 0.15, apply_min_p, is_recommended=True),\n',
    '    SamplingRule("top_a", 0.4, apply_top_a),\n',
)
FUNCTION = (
    "    return logits.masked_fill(logits < lowest, NEG_INF)\n",
    """
def apply_top_a(logits, top_a):
    probs = logits.softmax(dim=-1)
    lowest = top_a[:, None] * probs.amax(dim=-1, keepdim=True) ** 2
    return logits.masked_fill(probs < lowest, NEG_INF)
""",
)
CHANGES = {
    "request": ("01_batching/request.py", [FIELD, INTERVAL]),
    "common.sampling.sampling_rules": ("common/sampling/sampling_rules.py", [ROW, FUNCTION]),
}
CHECKS = """
from types import SimpleNamespace
import torch
from common.parallel.message import plan_from_map, plan_to_map
from common.runner.kv_sizing import SamplerWarmUp
from common.sampling.sampler import Sampler
from common.sampling.sampling_rules import BITS
from common.serve.errors import ApiError
from common.serve.wire import CompletionBody
from common.tests.sampling_cases import RECIPES, as_plain, mixed_sampling, sampling_probs
from request import SamplingParams
from scheduler_interface import NewRequestData, SchedulerOutput

logits = torch.tensor([[0.4, 0.3, 0.15, 0.1, 0.05]], dtype=torch.float64).log()
for params, num_kept, is_needed in (
    (dict(top_a=0.9), 3, True),  # at least 0.9 * 0.16
    (dict(top_a=0.4), 4, True),
    (dict(top_a=0.4, top_k=2), 2, True),
    (dict(top_a=0.9, top_p=0.5), 2, True),
    (dict(top_a=0.0), 5, False),
    (dict(top_a=0.9, temperature=0), 1, False),
):
    batch = mixed_sampling([SamplingParams(**params)], 1, 5, 0)
    expected = logits.masked_fill(torch.arange(5) >= num_kept, float("-inf")).softmax(-1)
    torch.testing.assert_close(sampling_probs(logits, batch), expected)
    assert bool(batch.batch_needs & BITS["top_a"]) == is_needed

alone, narrow = RECIPES["top_a"], SamplingParams(top_a=0.9, top_k=9)
recipes = [alone, narrow, RECIPES["everything"], RECIPES["limits"]]
logits, batch = 3 * torch.randn(4, 60), SimpleNamespace(sampling=mixed_sampling(recipes, 4, 60, 1))
plain = as_plain(Sampler(60).sample(logits, batch))
if find_spec("triton"):
    from common.sampling.sampler_kernel import KERNELS
    assert as_plain(Sampler(60, KERNELS).sample(logits, batch)) == plain

assert CompletionBody(prompt="x", top_a=0.25).params({}) == SamplingParams(top_a=0.25)
assert CompletionBody(prompt="x").params({}).top_a == 0
assert CompletionBody.model_json_schema()["properties"]["top_a"]["default"] is None
try:
    CompletionBody(prompt="x", top_a=2).params({})
except ApiError as error:
    assert error.param == "top_a"
    print(error)
plan = plan_from_map(plan_to_map(SchedulerOutput([NewRequestData("r", [0], alone)])))
assert plan.scheduled_new_reqs[0].sampling_params == alone
assert (SamplerWarmUp.of([2, 1], 60).sampling.needs & BITS["top_a"]).all()
"""
SCRIPT = """
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

for name, (path, changes) in CHANGES.items():
    text = (ROOT / path).read_text(encoding="utf-8")
    for before, more in changes:
        assert text.count(before) == 1, before
        text = text.replace(before, before + more)
    module = sys.modules[name] = ModuleType(name)
    exec(compile(text, path, "exec"), vars(module))
"""


def test_a_rule_is_a_field_and_a_row() -> None:
    given = f"from pathlib import Path\nROOT, CHANGES = Path({str(ROOT)!r}), {CHANGES!r}\n"
    script = [sys.executable, "-c", given + SCRIPT + CHECKS]
    found = subprocess.run(script, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    assert "top_a must be a finite number in [0.0, 1.0], got 2" in found.stdout
