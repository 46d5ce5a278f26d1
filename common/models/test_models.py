"""The models page, and what the demo says of a checkpoint that it cannot serve: one sentence,
before a weight is read and before the model's memory is taken."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from common import demo
from common.engine_config import SHIPPED_CHECKPOINT
from common.models import loader
from common.models.test_loader import CountingFile
from common.tests.model_cases import save_case
from workshop.book import models_page

pytestmark = pytest.mark.usefixtures("one_thread")
WEIGHTS = "model.safetensors"


def test_every_family_has_a_checkpoint_and_a_case():
    assert all(cell for row in models_page.rows() for cell in row)


def fields(**changes: object) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        config = json.loads((path / "config.json").read_text()) | changes
        (path / "config.json").write_text(json.dumps(config))

    return change


def of(architecture: str, **more: object) -> Callable[[Path], None]:
    return fields(architectures=[architecture], model_type="other", **more)


def tensors(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        found = load_file(path / WEIGHTS)
        change(found)
        save_file(found, path / WEIGHTS, metadata={"format": "pt"})

    return edit


def file(change: Callable[[Path], object], name: str) -> Callable[[Path], None]:
    return lambda path: change(path / name) and None


def sharded(change: Callable[[Path, dict[str, str]], object]) -> Callable[[Path], None]:
    """Of the weights in two files and of the map to them."""

    def edit(path: Path) -> None:
        found = load_file(path / WEIGHTS)
        names = {}
        for i, name in enumerate(sorted(found)):
            names[name] = f"model-{i % 2}.safetensors"
        (path / WEIGHTS).unlink()
        for file in set(names.values()):
            save_file({n: t for n, t in found.items() if names[n] == file}, path / file)
        change(path, names)
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))

    return edit


EXPERT = "model.layers.2.mlp.experts.4.up_proj.weight"
NORM = "model.layers.1.self_attn.q_norm.weight"  # of 16
QUERY = "model.layers.0.self_attn.q_proj.weight"
CASES: dict[str, tuple[Callable[[Path], None], str]] = {
    "unknown": (of("SomethingNew"), "architectures must be one of Qwen3For"),
    "gpt-oss": (of("GptOssForCausalLM", quantization_config={"quant_method": "mxfp4"}), "a sink"),
    "Qwen3.5": (of("Qwen3_5ForConditionalGeneration"), "keep a state instead of keys"),
    "encoder": (of("BertForMaskedLM"), "it is an encoder"),
    "without a head": (of("Qwen3Model"), "it has no head"),
    "quantized": (
        fields(quantization_config={"bits": 4, "modules_to_not_convert": ["lm_head"] * 999}),
        "quantization_config must",
    ),
    "other sizes": (fields(hidden_size=48), "(89, 32) in the checkpoint and (89, 48) by config"),
    "more layers": (fields(num_hidden_layers=4), "tensors that the model needs: model.lay"),
    "a shape": (tensors(lambda t: t.update({EXPERT: t[EXPERT][1:]})), "(23, 32) in the checkpoint"),
    "an expert missing": (tensors(lambda found: found.pop(EXPERT)), f"needs: {EXPERT}"),
    "a bias that config.json has not": (
        tensors(lambda t: t.update({QUERY.replace("weight", "bias"): torch.zeros(64)})),
        "the model lacks: model.layers.0.self_attn.q_proj.bias",
    ),
    "a shard missing": (sharded(lambda path, t: (path / t[QUERY]).unlink()), "model-0.safetensors"),
    "end of text": (
        file(lambda p: p.write_text('{"eos_token_id": [1, "2"]}'), "generation_config.json"),
        "generation_config.json: eos_token_id",
    ),
    "broadcasts": (tensors(lambda t: t.update({NORM: torch.zeros(1)})), "must have one shape, got"),
    "integers": (tensors(lambda t: t.update({QUERY: t[QUERY].char()})), f"{QUERY} must have dtype"),
    "no config": (file(Path.unlink, "config.json"), "has no config.json"),
    "no JSON": (file(lambda p: p.write_text("{"), "config.json"), "cannot read"),
    "no safetensors": (file(Path.unlink, WEIGHTS), f"has no weights: neither {WEIGHTS} nor"),
    "only .bin": (
        file(lambda p: p.rename(p.with_name("pytorch_model.bin")), WEIGHTS),
        "reading a pickled one may run any code",
    ),
    "cut off": (
        file(lambda p: p.write_bytes(p.read_bytes()[:-9]), WEIGHTS),
        f"{WEIGHTS} is corrupt or incomplete",
    ),
    "no tokenizer": (file(Path.unlink, "tokenizer.json"), "cannot load tokenizer"),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_case("qwen3-moe", tmp_path_factory.mktemp("sound"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SHIPPED_CHECKPOINT / name, path)
    return path


@pytest.mark.parametrize("case", CASES)
def test_an_unsupported_model_is_refused_before_its_weights(
    case, sound, tmp_path, capsys, monkeypatch
):
    read = Counter()
    real = loader._open_file
    monkeypatch.setattr(loader, "_open_file", lambda *a: CountingFile(real(*a), read))
    change, message = CASES[case]
    path = shutil.copytree(sound, tmp_path / "model")
    change(path)
    assert demo.main(["--model", str(path)]) == 2
    *_, sentence = capsys.readouterr().err.splitlines()
    assert sentence.startswith("error: ") and message in sentence and len(sentence) < 700
    assert not read, "weights were read"
