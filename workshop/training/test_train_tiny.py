"""The checkpoints that are shipped, and the text that they were trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.engine_config import SHIPPED_ADAPTER
from common.features.adapters.adapter_files import CONFIG, WEIGHTS
from workshop.training.tests import tiny_eval
from workshop.training.tiny_data import HELD_OUT, corpus

TINY, DRAFT = tiny_eval.CHECKPOINTS / "tiny", tiny_eval.CHECKPOINTS / "tiny-draft"


@pytest.fixture(scope="module")
def files() -> tuple[dict[str, str], dict[str, str]]:
    return corpus()


def test_held_out_files_are_not_trained_on(files: tuple[dict[str, str], dict[str, str]]) -> None:
    train, held_out = files
    assert set(held_out) == set(HELD_OUT)
    assert len(HELD_OUT) >= 12
    assert not set(train) & set(HELD_OUT)
    assert sum(map(len, train.values())) > 8_000_000
    texts = set(train.values())
    assert not any(text in texts for text in held_out.values()), "a copy under another name"


@pytest.mark.parametrize(("folder", "max_mb"), [(TINY, 12), (DRAFT, 2)])
def test_shipped_checkpoint_loads_in_transformers_and_is_small(folder: Path, max_mb: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (folder / "model.safetensors").stat().st_size <= max_mb * 1_000_000
    assert model.config.model_type == "qwen3"
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 0
    ids = tokenizer("def f(x):", return_tensors="pt").input_ids
    text = tokenizer.decode(model.generate(ids, max_new_tokens=40)[0], skip_special_tokens=True)
    assert text.startswith("def f(x):\n    ")
    assert (folder / "README.md").is_file()


def test_recorded_loss_and_agreement_are_those_of_the_shipped_weights(
    files: tuple[dict[str, str], dict[str, str]],
) -> None:
    """On one file."""
    record = json.loads((DRAFT / "evaluation.json").read_text())
    one = record["target_on_one_file"]
    text = {one["file"]: files[1][one["file"]]}
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    target, draft = tiny_eval.load(TINY), tiny_eval.load(DRAFT)
    found = tiny_eval.evaluate(target, tokenizer, text, torch.device("cpu"))
    same_text = found["num_bytes"] == one["num_bytes"]  # other Pythons have other texts
    assert found["nats_per_token"] == pytest.approx(
        one["nats_per_token"], rel=1e-3 if same_text else 0.1
    )
    assert record["greedy_agreement"] >= 0.55, "a draft that knows nothing of its target"
    agreement = tiny_eval.greedy_agreement(target, draft, tokenizer, text)
    assert agreement == pytest.approx(record["greedy_agreement"], abs=0.1)


def test_the_shipped_adapter_is_small_and_writes_tests() -> None:
    files = {path.name: path.stat().st_size for path in SHIPPED_ADAPTER.iterdir()}
    assert set(files) == {CONFIG, WEIGHTS, "README.md", "training_record.json"}
    assert sum(files.values()) <= 500 * 1024
    found = json.loads((SHIPPED_ADAPTER / "training_record.json").read_text())["held_out"]
    assert found["base"]["share_of_tests"] < 0.1 < 0.5 <= found["adapter"]["share_of_tests"]
