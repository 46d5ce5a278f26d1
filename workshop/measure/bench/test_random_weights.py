"""Small checkpoints of every family, and the bench that measures experts, with next to no work."""

from __future__ import annotations

import pytest
import torch

from common.models.loader import load_model
from common.requests.tokenizer import load_tokenizer
from common.tests.model_cases import PagedHarness, reference_logits
from workshop.measure.bench.experts_bench import NUMBERS, measure, table_of
from workshop.measure.bench.random_weights import FAMILIES, write_random

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_small_checkpoint_is_a_model_of_its_family(family, tmp_path):
    write_random(family, tmp_path)
    prompt = load_tokenizer(tmp_path).encode("def add(a, b):")
    expected = reference_logits(tmp_path, torch.float64, [prompt])[0]
    logits = PagedHarness(load_model(tmp_path, torch.float64).model, 1).step([(0, 0, prompt)])
    assert (logits - expected).abs().max() < 1e-9
    assert expected.std() > 0.01


def test_every_architecture_has_one(tmp_path):
    from common.models.model_config import SUPPORTED_ARCHITECTURES

    assert {fields["architectures"][0] for fields in FAMILIES.values()} == set(
        SUPPORTED_ARCHITECTURES
    )
    with pytest.raises(ValueError, match=r"family must be qwen3, .*, got 'gpt2'"):
        write_random("gpt2", tmp_path)


def test_the_experts_bench_counts_what_was_read():
    sizes = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16)
    record = measure(1, sizes, hidden=32)
    read = [record["found"][str(n)]["num_read"][0] for n in NUMBERS]
    assert read[0] == 2 and read == sorted(read) and read[-1] == 8
    itemsize = getattr(torch, record["config"]["dtype"]).itemsize
    assert record["config"]["bytes_per_expert"] == 3 * 32 * 16 * itemsize
    lines = table_of(record).splitlines()
    assert len(lines) == 2 + len(NUMBERS)
    assert "experts read, of 8 |" in lines[0] and lines[-1].startswith("| 128 | 8 |")
