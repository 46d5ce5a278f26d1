"""The checkpoints that are shipped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.engine_config import SHIPPED_ADAPTER, SHIPPED_CHECKPOINT, SHIPPED_DRAFT
from common.features.adapters.adapter_files import CONFIG, WEIGHTS


@pytest.mark.parametrize(("folder", "max_mb"), [(SHIPPED_CHECKPOINT, 12), (SHIPPED_DRAFT, 2)])
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


def test_the_shipped_adapter_is_small_and_writes_tests() -> None:
    files = {path.name: path.stat().st_size for path in SHIPPED_ADAPTER.iterdir()}
    assert set(files) == {CONFIG, WEIGHTS, "README.md", "training_record.json"}
    assert sum(files.values()) <= 500 * 1024
    found = json.loads((SHIPPED_ADAPTER / "training_record.json").read_text())["held_out"]
    assert found["base"]["share_of_tests"] < 0.1 < 0.5 <= found["adapter"]["share_of_tests"]
