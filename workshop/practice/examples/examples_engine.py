"""Exhibits of the engine around the chapters: sampling, text, one bad row."""

from __future__ import annotations

from workshop.practice.examples.example_tools import CODE, GUESS, SONG, say


def a_token_from_the_middle() -> str:
    from common.llm import SamplingParams

    prompts = [CODE, "Once upon a time"]
    params = SamplingParams(temperature=0, max_tokens=12)
    whole, pieces = say(prompts, params), say(prompts, params, chunked_prefill=8)
    return f"whole:     {whole[0]}\nin chunks: {pieces[0]}"


def constraints_on_the_last_row() -> str:
    from common.llm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=12, presence_penalty=2.0)
    plain, guessed = say([SONG], params), say([SONG], params, speculative=GUESS)
    return f"plain:        {plain[0]}\nwith drafts:  {guessed[0]}"


def a_seed_that_is_not_asked() -> str:
    from common.llm import SamplingParams

    params = SamplingParams(temperature=0.8, seed=7, max_tokens=16)
    plain, guessed = say([SONG], params), say([SONG], params, speculative=GUESS)
    return f"seed 7, with and without drafts: the same text: {plain == guessed}"


def a_lane_that_is_no_token() -> str:
    import torch

    from common.sampling.sampler import Sampler

    logits = torch.zeros(1, 8)
    logits[0, 6] = 9.0  # the matrix was padded from 6 to 8 rows
    logits[0, 2] = 1.0
    token = int(Sampler(vocab_size=6).raw_logits(logits).argmax())
    return f"a vocabulary of 6 tokens in a matrix of 8 rows: token {token} wins"


def at_the_border_of_top_p() -> str:
    import torch

    from common.sampling.sampling_constraints import NEG_INF, apply_top_p

    probs = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64)
    kept = apply_top_p(probs.log(), torch.tensor([0.7], dtype=torch.float64)) > NEG_INF
    return f"probabilities 0.5, 0.3, 0.2 and top_p 0.7: tokens kept: {int(kept.sum())}"


def halves_of_characters() -> str:
    from common.engine_config import SHIPPED_CHECKPOINT
    from common.requests.tokenizer import IncrementalDetokenizer, load_tokenizer

    tokenizer = load_tokenizer(SHIPPED_CHECKPOINT)
    detokenizer, pieces = IncrementalDetokenizer(tokenizer, tokenizer.encode("a")), []
    for token in tokenizer.encode("naïve 你好 👍"):
        detokenizer.append(token)
        pieces.append(detokenizer.take_delta())
    return "streamed: " + "".join(pieces)


def one_bad_row() -> str:
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
    return f"three requests, one with NaN logits; served: {sorted(output.token_ids)}"


def whose_adapter() -> str:
    from common.engine_config import SHIPPED_ADAPTER
    from common.llm import LLM, SamplingParams

    prompt = 'def mean(values):\n    """Return the arithmetic mean of the values."""'
    params, texts = SamplingParams(temperature=0, max_tokens=12), []
    for first in (None, "tests"):
        llm = LLM(device="cpu", num_blocks=99, compile=False, adapters={"tests": SHIPPED_ADAPTER})
        llm.generate(prompt, params, adapter=first, use_tqdm=False)
        answer = llm.generate(prompt, params, adapter="tests", use_tqdm=False)
        texts.append(answer[0].outputs[0].text)
    same = texts[0] == texts[1]
    return f"first without, then with the adapter: the adapter's text: {same}"


def a_fraction_of_its_strength() -> str:
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
    return f"rank 16, alpha 16, rsLoRA: A and B of ones add {added} to a row of one 1"


def a_refused_end() -> str:
    from common.llm import SamplingParams

    grammar = {"regex": r"[a-z_ \n]+"}
    params = SamplingParams(temperature=0, max_tokens=12, grammar=grammar)
    guess = {"method": "draft", "num_spec_tokens": 4, "adaptive": False}
    (answer,) = say(["from math import "], params, speculative=guess)
    return f"allowed are letters, _, blanks and new lines; the answer: {answer}"


def blanks_to_the_end() -> str:
    from common.llm import SamplingParams

    schema = {"type": "object", "properties": {"is_ok": {"type": "boolean"}}, "required": ["is_ok"]}
    grammar = {"json": schema | {"additionalProperties": False}}
    params = SamplingParams(temperature=0, max_tokens=24, grammar=grammar)
    (answer,) = say(["# comment\n"], params)
    return f"JSON, of at most 24 tokens: {answer}"
