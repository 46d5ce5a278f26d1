from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from common.models import loader
from common.models.linear import Linear, OneDnnProduct, linear_layers, reason_not_packed
from common.models.loader import load_model, resolve_checkpoint
from common.models.model import DecoderModel
from common.models.model_config import ModelConfig
from common.tests.model_cases import CASES, save_case

WEIGHTS = "model.safetensors"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Untied, without biases."""
    return save_case("mistral", tmp_path)


class CountingFile:
    """A safetensors file that says what was read from it. Its other ways to be read are not
    there."""

    def __init__(self, file, read: Counter) -> None:
        self.file = file
        self.read = read
        self.keys = file.keys

    def get_slice(self, name: str):
        stored = self.file.get_slice(name)
        read = self.read

        class Slice:
            get_shape = stored.get_shape
            get_dtype = stored.get_dtype

            def __getitem__(self, part):
                values = stored[part]
                read[name] += values.numel()
                return values

        return Slice()


def edit_weights(path: Path, edit) -> None:
    tensors = load_file(path / WEIGHTS)
    edit(tensors)
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})


def edit_json(path: Path, **changes) -> None:
    fields = json.loads(path.read_text())
    path.write_text(json.dumps({**fields, **changes}))


def state(path: Path) -> dict[str, torch.Tensor]:
    return dict(load_model(path, torch.float64).model.named_parameters())


def assert_same_weights(first: dict, second: dict) -> None:
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


# -- one plain layer at a time


@pytest.mark.skipif(reason_not_packed(torch.float32, torch.device("cpu")) is not None, reason="ARM")
@pytest.mark.parametrize("name", CASES)
def test_a_layer_is_packed_before_the_next_one_is_read(name, tmp_path, monkeypatch):
    path = save_case(name, tmp_path)
    expected = dict(load_model(path, torch.float32).model.named_weights())
    order = []
    real = loader._open_file

    class Read(Counter):
        def __setitem__(self, name: str, number: int) -> None:
            order.append(loader._layer_of(name))

    pack = Linear.pack

    def watched_pack(matrix: Linear, *naming, **packing) -> None:
        order.append("pack")
        pack(matrix, *naming, **packing)

    with monkeypatch.context() as patch:
        patch.setattr(loader, "_open_file", lambda *names: CountingFile(real(*names), Read()))
        patch.setattr(Linear, "pack", watched_pack)
        model = load_model(path, torch.float32, packing_of=lambda model: OneDnnProduct).model
    first_pack = order.index("pack")
    assert set(order[:first_pack][-3:]) == {0} and 1 in order[first_pack:]
    assert all(matrix.packed for matrix in linear_layers(model))
    assert_same_weights(dict(model.named_weights()), expected)


# -- every tensor once, every parameter once


@pytest.mark.parametrize("name", CASES)
def test_targets_cover_every_parameter_exactly_once(name, tmp_path):
    path = save_case(name, tmp_path)
    config = ModelConfig.from_hf(json.loads((path / "config.json").read_text()))
    model = DecoderModel(config)
    for parameter in model.parameters():
        parameter.zero_()
    parts = model.checkpoint_tensors()
    for part in parts.values():
        part.target.add_(1)
    assert all((parameter == 1).all() for parameter in model.parameters())
    assert {n: list(p.shape) for n, p in parts.items()} == {
        n: list(t.shape) for n, t in load_file(path / WEIGHTS).items()
    }


# -- tied embeddings


@pytest.mark.parametrize("naming", ["embedding only", "head only", "both"])
def test_a_tied_matrix_may_have_either_name_or_both_and_is_one_parameter(naming, tmp_path):
    """And rotary buffers of old checkpoints are skipped."""
    before = state(save_case("qwen2", tmp_path))

    def edit(tensors: dict) -> None:
        assert HEAD not in tensors
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.full((12,), 9.0)
        if naming != "embedding only":
            tensors[HEAD] = tensors[EMBEDDING].clone()
        if naming == "head only":
            del tensors[EMBEDDING]

    edit_weights(tmp_path, edit)
    model = load_model(tmp_path, torch.float64).model
    assert_same_weights(dict(model.named_parameters()), before)
    assert model.lm_head.weight is model.embed_weight


@pytest.mark.net
def test_a_tied_matrix_that_is_stored_twice_and_differs_is_refused(tmp_path):
    path = save_case("qwen2", tmp_path)
    edit_weights(path, lambda t: t.update({HEAD: t[EMBEDDING] + 1}))
    with pytest.raises(ValueError, match="tie_word_embeddings must be false"):
        load_model(path)


def test_shards_give_the_weights_of_the_single_file(checkpoint, tmp_path):
    before = state(checkpoint)
    path = tmp_path / "sharded"
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
    model.save_pretrained(path, max_shard_size="30KB")
    assert len(list(path.glob("model-*.safetensors"))) > 3 and not (path / WEIGHTS).exists()
    assert_same_weights(state(path), before)


def test_a_tensor_in_two_files_is_refused(checkpoint, tmp_path):
    path = tmp_path / "twice"
    shutil.copytree(checkpoint, path)
    for name in ("a.safetensors", "b.safetensors"):
        shutil.copy(path / WEIGHTS, path / name)
    (path / WEIGHTS).unlink()
    index = {"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}
    (path / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="a tensor in two files"):
        load_model(path)
    (path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="must hold a JSON object"):
        load_model(path)


def test_missing_things_are_file_not_found(checkpoint, tmp_path, monkeypatch):
    """Trap 48: a wrong directory is refused, not served with whatever memory held. The hub is
    asked only for the id of a model."""
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    (tmp_path / "empty").mkdir()
    no_ids = ("a/b/c", "./models/x", "some org/model", "/nowhere/at/all", Path("org/model"))
    for model, message in (
        (tmp_path / "empty", "no config.json"),
        (checkpoint / "config.json", "must be a model directory"),
        *((name, "model must be a directory") for name in no_ids),
    ):
        with pytest.raises(FileNotFoundError, match=message):
            load_model(model)


# -- the hub


def test_a_hub_id_is_downloaded_and_a_failure_lists_the_attempts(checkpoint, monkeypatch):
    def download(repo_id: str, **options) -> str:
        assert options["allow_patterns"] == loader._DOWNLOADS
        if repo_id == "some-org/Some.Model-1_b":
            return str(checkpoint)
        raise OSError("no route to host\nlong story")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_checkpoint("some-org/Some.Model-1_b") == checkpoint
    with pytest.raises(FileNotFoundError, match="model must be a directory or a hub id") as caught:
        resolve_checkpoint("some-org/some-model")
    assert "some-org/some-model" in str(caught.value) and "\n" not in str(caught.value)


# -- dtype and end of text


@pytest.mark.parametrize(
    ("dtype", "is_fast", "expected"),
    [
        (torch.float64, False, torch.float64),
        (torch.bfloat16, False, torch.float32),
        (torch.bfloat16, True, torch.bfloat16),
        (torch.float16, False, torch.float32),
        (torch.float16, True, torch.float16),
    ],
)
def test_auto_dtype_is_the_checkpoints_unless_the_cpu_is_slow_at_it(
    dtype, is_fast, expected, checkpoint, monkeypatch
):
    edit_weights(checkpoint, lambda t: t.update({name: t[name].to(dtype) for name in t}))
    edit_json(checkpoint / "config.json", dtype=None, torch_dtype=None)
    monkeypatch.setattr("common.models.loader.is_bfloat16_fast", lambda: is_fast)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: is_fast)
    assert {p.dtype for p in load_model(checkpoint).model.parameters()} == {expected}


def test_a_dtype_can_be_asked_for(checkpoint):
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        for name in (dtype, str(dtype).removeprefix("torch.")):
            assert load_model(checkpoint, name).model.norm_weight.dtype == dtype
    for dtype in ("int8", "fp16", torch.int64, None, 16):
        with pytest.raises(ValueError, match=f"dtype must be .*bfloat16, .*, got {dtype!r}"):
            load_model(checkpoint, dtype)


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        (None, None, ()),
        (7, None, (7,)),
        (7, [3, 7, 5], (3, 7, 5)),
        ([2, 4], [4, 6], (4, 6, 2)),
        (7, "absent", (7,)),
        (-1, [88, 89], (88,)),  # the vocabulary ends at 88
    ],
)
def test_all_end_of_text_ids_of_both_files_count(in_config, in_generation, expected, checkpoint):
    """Trap 49."""
    edit_json(checkpoint / "config.json", eos_token_id=in_config)
    generation = checkpoint / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": in_generation}))
    if in_generation == "absent":
        generation.unlink()
    assert load_model(checkpoint).generation_eos_token_ids == expected
