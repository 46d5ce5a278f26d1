"""Small checkpoints of every family."""

from __future__ import annotations

import pytest
import torch

from common.models.families import SUPPORTED_ARCHITECTURES
from common.models.loader import load_model
from common.requests.tokenizer import load_tokenizer
from common.tests.model_cases import PagedHarness, reference_logits
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
    named = {fields["architectures"][0] for fields in FAMILIES.values()}
    assert named == set(SUPPORTED_ARCHITECTURES)
    with pytest.raises(ValueError, match=r"family must be qwen3, .*, got 'gpt2'"):
        write_random("gpt2", tmp_path)
