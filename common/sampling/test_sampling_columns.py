"""The columns hold what the parameters say, and nothing of the request that had the row before."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from batch_layout import Queries
from common.requests.input_processor import DrawnSeedParams
from common.sampling import sampling_rules
from common.sampling.prompt_logprobs import PromptLogprobs
from common.sampling.runner_plugin import NO_TOKEN, UploadBuffer, missing_reason
from common.sampling.sampling_columns import ALL, SamplingColumns
from common.sampling.sampling_rules import BITS, NUMBERS
from request import SamplingParams
from scheduler_interface import NewRequestData

OTHERS = {name: getattr(sampling_rules, name) for name in ("DRAWN", "MIN_TOKENS", "LOGPROBS")}
NO_RULES = {"allowed": None, "biased": [], "bias": [], "bad_words": []}
CASES: list[tuple[SamplingParams, str]] = [
    (SamplingParams(temperature=0), ""),
    (SamplingParams(temperature=0, top_k=3, top_p=0.5, min_p=0.1), ""),
    (SamplingParams(), "DRAWN"),
    (SamplingParams(temperature=1e-9), "DRAWN temperature"),
    (SamplingParams(top_k=1), "DRAWN top_k"),
    (SamplingParams(top_k=256, top_p=0.9), "DRAWN top_k top_p"),
    (SamplingParams(top_k=257, min_p=0.1), "DRAWN top_k min_p"),
    (SamplingParams(temperature=0, logprobs=0), "LOGPROBS"),
    (SamplingParams(temperature=0, logprobs=-1), "LOGPROBS"),  # of the whole vocabulary
    (SamplingParams(temperature=0, repetition_penalty=0.5), "repetition_penalty"),
    (SamplingParams(temperature=0, presence_penalty=-0.5), "presence_penalty"),
    (SamplingParams(seed=-3, frequency_penalty=0.1), "DRAWN frequency_penalty"),
    (SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[9, 1]), "MIN_TOKENS"),
    (SamplingParams(temperature=0, min_tokens=2, ignore_eos=True), "MIN_TOKENS"),
    (DrawnSeedParams(seed=2**63 - 1), "DRAWN"),
]


def check(columns: SamplingColumns, row: int, params: SamplingParams, bits: str) -> None:
    assert columns.numbers[:, row].tolist() == [getattr(params, name) for name in NUMBERS]
    assert columns.min_tokens[row] == params.min_tokens
    assert columns.seed[row] == (params.seed or 0)
    num_logprobs = {None: -1, -1: ALL}.get(params.logprobs, params.logprobs)
    assert columns.num_logprobs[row] == num_logprobs
    assert columns.is_seed_drawn[row] == isinstance(params, DrawnSeedParams)
    found = {name for name, bit in (BITS | OTHERS).items() if columns.needs[row] & bit}
    assert found == set(bits.split())
    eos = set() if params.ignore_eos else {1, 4}
    expected = sorted(eos | set(params.stop_token_ids)) if params.min_tokens else None
    found = columns.forbidden.get(row)
    assert (None if found is None else sorted(set(found.tolist()))) == expected


@pytest.mark.parametrize("seed", range(5))
def test_rows_are_what_was_last_written_to_them_through_reuse_and_growth(seed: int) -> None:
    rng = random.Random(seed)
    columns = SamplingColumns(2)
    num_rows = 2
    live = {}
    for _ in range(100):
        row = rng.randrange(num_rows)
        match rng.randrange(6):
            case 0:
                columns.release(row)
                live.pop(row, None)
                assert columns.needs[row] == 0 and row not in columns.forbidden
            case 1 if num_rows < 50:
                num_rows *= 2
                columns.grow(num_rows)
                every = (c for c in vars(columns).values() if isinstance(c, np.ndarray))
                assert all(c.shape[-1] == num_rows for c in every)
            case _:
                live[row] = *rng.choice(CASES), rng.choice([None, rng.randrange(20)])
                params, _, bad = live[row]
                rules = None if bad is None else NO_RULES | {"bad_words": [[bad]]}
                columns.write(row, params, (4, 1), rules)
        for row, (params, bits, bad) in live.items():
            check(columns, row, params, bits)
            assert bool(columns.needs[row] & sampling_rules.TOKEN_RULES) == (bad is not None)
            assert bad is None or columns.rules[row].bad.tolist() == [bad]


@pytest.mark.parametrize(
    ("rules", "named"),
    [
        ({"a": "01", "b": "10", "c": "11"}, "a and b"),
        ({"a": "00", "b": "10"}, "a"),
        ({"a": "110", "b": "101", "c": "011"}, "a and b and c"),
        ({"a": "01", "b": "11"}, None),
        ({}, None),
    ],
)
def test_the_reason_of_a_request_without_a_token_names_only_rules_with_a_part(rules, named) -> None:
    may_come = {name: np.array([bit == "1" for bit in bits]) for name, bits in rules.items()}
    found = missing_reason(may_come)
    assert found == (named and f"{named}: {NO_TOKEN}")


def test_a_prompt_is_scored_from_its_beginning_whoever_had_its_row() -> None:
    plugin = PromptLogprobs(9)
    plugin.grow(1)
    for prompt in ([1, 2, 3, 4, 5], [6, 7, 8]):
        features = {"prompt_logprobs": 0}
        plugin.admit(0, NewRequestData("a", prompt, SamplingParams(), features=features))
        queries = Queries(*(np.array([n]) for n in (0, 0, len(prompt), 1)))
        state = SimpleNamespace(token_ids=np.array([prompt]))
        step = SimpleNamespace(queries=queries, req_ids=["a"], state=state)
        upload = UploadBuffer(torch.device("cpu"))
        scored = plugin.stage(step)  # pyright: ignore[reportArgumentType]
        assert scored is not None
        upload.fill(scored)
        upload.send()
        assert scored.tokens.tolist() == prompt[1:]
