"""LoRA adapters for tests, as PEFT writes them, and what PEFT computes with them."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from common.features.adapters.adapter_files import CONFIG, WEIGHTS
from common.tests.engine_oracle import greedy
from common.tests.model_cases import by_transformers

logging.getLogger("peft").setLevel(logging.ERROR)
# Of mixed ranks, scales and targets.
KINDS = {
    "everything": dict(r=8, lora_alpha=16, target_modules="all-linear"),
    "attention": dict(
        r=4,
        lora_alpha=8,
        use_rslora=True,
        target_modules=["q_proj", "v_proj"],
    ),
    "one layer": dict(
        r=2,
        lora_alpha=7,
        target_modules=r".*\.(o_proj|gate_proj|down_proj)",
    ),
}
# Experts take none.
OF_ATTENTION = {
    name: {**kind, "target_modules": targets}
    for (name, kind), targets in zip(
        KINDS.items(), (["q_proj", "k_proj", "v_proj", "o_proj"], ["q_proj", "v_proj"], ["o_proj"])
    )
}


def _base(path: Path) -> torch.nn.Module:
    model = by_transformers(path, torch.float64)
    model.generation_config.eos_token_id = None
    return model


def save_adapter(base: Path, path: Path, seed: int = 0, **config) -> Path:
    """With random weights, which change most tokens."""
    from peft import LoraConfig, get_peft_model  # not above: it takes seconds

    torch.manual_seed(seed)
    model = get_peft_model(_base(base), LoraConfig(task_type="CAUSAL_LM", **config))
    for name, weight in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(path)
    return path


def by_peft(base: Path, adapter: Path | None, prompts: list[list[int]], n: int) -> list[list[int]]:
    """Greedy continuations of `n` tokens, one request at a time."""
    model = with_peft(base, adapter)
    return [greedy(model, prompt, n) for prompt in prompts]


def with_peft(base: Path, adapter: Path | None) -> torch.nn.Module:
    model = _base(base)
    if adapter is None:
        return model
    from peft import PeftModel

    return PeftModel.from_pretrained(model, adapter).double()


def edited(adapter: Path, path: Path, config: dict | None = None, tensors=None) -> Path:
    """A copy with other fields; `tensors` is called with all of them, and may change them."""
    path.mkdir(parents=True)
    fields = json.loads((adapter / CONFIG).read_text()) | (config or {})
    (path / CONFIG).write_text(json.dumps(fields))
    weights = load_file(adapter / WEIGHTS)
    if tensors is not None:
        tensors(weights)
    save_file(weights, path / WEIGHTS)
    return path
