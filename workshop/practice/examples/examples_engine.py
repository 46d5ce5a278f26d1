"""The engine around the chapters: a padded vocabulary, one bad row, the strength of an adapter."""

from __future__ import annotations

from workshop.practice.examples.example_tools import GUESS, SONG, Lines, say


def a_lane_that_is_no_token() -> Lines:
    import torch

    from common.sampling.sampler import Sampler

    logits = torch.zeros(1, 8)
    logits[0, 6] = 9.0  # the matrix was padded from 6 to 8 rows
    logits[0, 2] = 1.0
    token = int(Sampler(vocab_size=6).raw_logits(logits).argmax())
    yield f"a vocabulary of 6 tokens in a matrix of 8 rows: token {token} wins"


def one_bad_row() -> Lines:
    from dataclasses import dataclass

    import torch

    from common.sampling.sampler import Sampler
    from common.sampling.sampling_columns import SamplingBatch
    from common.tests.sampling_cases import make_sampling
    from request import SamplingParams

    logits = torch.tensor([[0.0, 1.0], [float("nan"), 0.0], [1.0, 0.0]])

    @dataclass
    class Batch:
        sampling: SamplingBatch

    batch = Batch(make_sampling([SamplingParams(temperature=0)] * 3))
    output = Sampler(2).sample(logits, batch)
    yield f"three requests, one with NaN logits; served: {sorted(output.token_ids)}"


def a_fraction_of_its_strength() -> Lines:
    import json
    from pathlib import Path
    from tempfile import TemporaryDirectory

    import torch
    from safetensors.torch import save_file

    from common.features.adapters.adapter_files import CONFIG, WEIGHTS, read_adapter

    name, rank = "model.layers.0.mlp.down_proj", 16
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "use_rslora": True}
    ones = {"A": torch.ones(rank, 4), "B": torch.ones(4, rank)}
    with TemporaryDirectory() as folder:
        (Path(folder) / CONFIG).write_text(json.dumps(config | {"target_modules": ["down_proj"]}))
        tensors = {f"base_model.model.{name}.lora_{n}.weight": one for n, one in ones.items()}
        save_file(tensors, Path(folder) / WEIGHTS)
        adapter = read_adapter(folder, {name: (4, 4)}, rank, torch.float32)
    matrix = adapter.matrices[name]
    added = (matrix.b @ matrix.a)[0, 0].item()
    yield f"rank 16, alpha 16, rsLoRA: A and B of ones add {added} to a row of one 1"


def constraints_on_the_last_row() -> Lines:
    from common.llm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=12, presence_penalty=2.0)
    plain, guessed = say([SONG], params), say([SONG], params, speculative=GUESS)
    yield f"plain:        {plain[0]}\nwith drafts:  {guessed[0]}"
