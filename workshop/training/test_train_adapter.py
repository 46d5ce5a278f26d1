"""The adapter's trainer, on a few functions; and the adapter that it has left here."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer

from common.engine_config import SHIPPED_ADAPTER
from common.features.adapters.adapter_files import CONFIG, WEIGHTS
from common.llm import LLM, SamplingParams
from workshop.training import train_adapter
from workshop.training.train_adapter import (
    AdapterTraining,
    Documents,
    card,
    train,
)

LIBRARY = 'def mean(values):\n    """Return the mean."""\n    return sum(values)\n'
TESTS = "self.assertEqual(mean([1, 2]), 1.5)\nself.assertEqual(math.gcd(2, 4), 2)\n"


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(train_adapter.BASE / "tokenizer.json"))


def test_training_lowers_the_loss_and_writes_a_loadable_adapter(tokenizer, tmp_path) -> None:
    documents = Documents(tokenizer, [LIBRARY], [TESTS.replace("1.5", str(n)) for n in range(12)])
    config = AdapterTraining(num_steps=12, num_documents=1, rank=2, alpha=4)
    record = train(config, documents, documents, tmp_path)
    held_out = record["held_out"]
    assert held_out["adapter"]["nats_per_token"] < 0.9 * held_out["base"]["nats_per_token"]
    assert json.loads((tmp_path / "training_record.json").read_text()) == record
    llm = LLM(num_blocks=20, adapters={"new": tmp_path})
    prompt = documents.heads[0].text
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    plain, adapted = (llm.generate(prompt, params, adapter=name)[0] for name in (None, "new"))
    assert plain.outputs[0].token_ids != adapted.outputs[0].token_ids


# -- what is shipped


def test_the_shipped_adapter_is_small_and_its_card_is_of_its_record() -> None:
    files = {path.name: path.stat().st_size for path in SHIPPED_ADAPTER.iterdir()}
    assert set(files) == {CONFIG, WEIGHTS, "README.md", "training_record.json"}
    assert sum(files.values()) <= 500 * 1024
    assert json.loads((SHIPPED_ADAPTER / CONFIG).read_text())["base_model_name_or_path"] == "tiny"
    record = json.loads((SHIPPED_ADAPTER / "training_record.json").read_text())
    assert (SHIPPED_ADAPTER / "README.md").read_text() == card(record)
    found = record["held_out"]
    assert found["base"]["share_of_tests"] < 0.1 < 0.5 <= found["adapter"]["share_of_tests"]
