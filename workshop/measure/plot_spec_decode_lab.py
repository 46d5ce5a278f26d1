"""Speculation without an engine: the acceptance of each rule, and the cost of a draft token.
`plot_spec_decode.py --record rules proposers` runs this module; alone it does nothing.

`rules`: target and draft distributions at every position of held-out files; the chance that a draft
token is accepted, computed exactly from each pair, not sampled.
`proposers`: the proposing of one step, for histories of different lengths.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import torch

from batch_layout import ComposedBatch
from common.engine_config import SHIPPED_CHECKPOINT, SHIPPED_DRAFT
from common.models.loader import LoadedModel, load_model
from common.requests.tokenizer import load_tokenizer
from common.runner.kv_sizing import allocate_kv_cache
from draft_acceptance import acceptance_probability
from draft_model_proposer import DraftModelProposer
from input_batch import RunnerRequest
from kv_memory import SharingRunnerState
from ngram_index import BulkNgramProposer
from paged_attention import AttentionMetadata, TorchAttentionBackend
from proposers import ProposerInput
from request import SamplingParams
from scheduler_interface import NewRequestData
from workshop.measure.plot_spec_decode_engine import held_out_texts, in_turn

RULES = ("rejection", "shared", "argmax", "matching")
TEMPERATURES = (0.5, 0.7, 1.0, 1.3)
TEXT_LEN = 512
HISTORY_LENS = (64, 256, 512, 1024, 1984)
LONG_HISTORY_LENS = (*HISTORY_LENS, 8192, 32768)


@torch.inference_mode()
def _logits(loaded: LoadedModel, ids: list[int]) -> torch.Tensor:
    """Return the logits of every position of one text, [len(ids), vocab_size]."""
    size = 16
    num_blocks = -(-len(ids) // size)
    cache = allocate_kv_cache(loaded, num_blocks + 1, size)
    positions = torch.arange(len(ids))
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, len(ids)]),
        seq_lens=torch.tensor([len(ids)]),
        block_tables=torch.arange(1, num_blocks + 1, dtype=torch.int32)[None],
        slot_mapping=positions + size,
        max_query_len=len(ids),
        max_seq_len=len(ids),
    )
    batch = ComposedBatch(torch.tensor(ids), positions, (metadata,), positions)
    batch.plan_attention(TorchAttentionBackend(), loaded.model.num_heads, cache)
    return loaded.model(batch, cache)


def measure_rules(*, tiny: bool) -> dict:
    device = torch.device("cpu")
    target, draft = (load_model(p, "float64", device) for p in (SHIPPED_CHECKPOINT, SHIPPED_DRAFT))
    tokenizer = load_tokenizer(SHIPPED_CHECKPOINT)
    texts = [ids[:TEXT_LEN] for ids in held_out_texts(tokenizer)][: 1 if tiny else None]
    sums: dict[str, dict[str, float]] = {str(t): dict.fromkeys(RULES, 0.0) for t in TEMPERATURES}
    num_positions = 0
    for ids in texts:
        logits = [_logits(model, ids) for model in (target, draft)]
        num_positions += len(ids)
        for temperature in TEMPERATURES:
            p, q = (x.div(temperature).softmax(-1) for x in logits)
            for rule in RULES:
                sums[str(temperature)][rule] += float(acceptance_probability(p, q, rule).sum())
    greedy = sum(
        int((_logits(target, ids).argmax(-1) == _logits(draft, ids).argmax(-1)).sum())
        for ids in texts
    )
    return {
        "config": {"num_texts": len(texts), "num_positions": num_positions, "dtype": "float64"},
        "greedy": round(greedy / num_positions, 4),
        "acceptance": {
            t: {rule: round(total / num_positions, 4) for rule, total in by_rule.items()}
            for t, by_rule in sums.items()
        },
    }


def _history(length: int) -> RunnerRequest:
    rng = random.Random(length)
    tokens = [rng.randrange(2000) for _ in range(length)]
    return RunnerRequest(str(length), SamplingParams(max_tokens=10**6), tokens, [])


def _follow(request: RunnerRequest) -> ProposerInput:
    """Return the input after a decode step: the proposer lags by the last token."""
    return ProposerInput(request, request.num_tokens - 2, request.num_tokens - 1)


def search_anew(tokens: list[int], longest: int, shortest: int, k: int) -> list[int]:
    """Search without an index: the whole history, in each step."""
    for n in range(longest, shortest - 1, -1):
        suffix = tokens[-n:]
        for start in range(len(tokens) - n):
            if tokens[start : start + n] == suffix:
                return tokens[start + n : start + n + k]
    return []


def _time_us(step: Callable[[], object], num_steps: int) -> float:
    start = time.perf_counter()
    for _ in range(num_steps):
        step()
    return round(1e6 * (time.perf_counter() - start) / num_steps, 2)


def measure_proposers(*, tiny: bool) -> dict:
    """Return microseconds of a step with one new token that proposes four draft tokens."""
    num_rounds, num_steps = (1, 3) if tiny else (7, 30)
    lengths = LONG_HISTORY_LENS[:2] if tiny else LONG_HISTORY_LENS
    loaded = load_model(SHIPPED_DRAFT, "auto", torch.device("cpu"))
    runs: dict[str, dict[str, list[float]]] = {}
    for length in lengths:
        steps: dict[str, Callable[[], object]] = {}
        indexed, searched = _history(length), _history(length)
        ngram = BulkNgramProposer(num_spec_tokens=4)
        ngram.propose([_follow(indexed)], [4])

        def step_indexed(request=indexed, proposer=ngram) -> None:
            request.output_token_ids.append(2000 + request.num_tokens % 7)
            proposer.propose([_follow(request)], [4])

        def step_searched(tokens=searched.prompt_token_ids) -> None:
            tokens.append(2000 + len(tokens) % 7)
            search_anew(tokens, 4, 2, 4)

        steps |= {"n-gram, indexed": step_indexed, "n-gram, searched again": step_searched}
        if length in HISTORY_LENS:
            steps["draft model, 4 rounds"] = _draft_step(loaded, length)
        for name in in_turn(steps, num_rounds):
            few = num_steps if length <= 2048 else max(1, num_steps // 5)
            runs.setdefault(name, {}).setdefault(str(length), []).append(_time_us(steps[name], few))
    return {
        "config": {
            "num_rounds": num_rounds,
            "num_steps": num_steps,
            "num_threads": torch.get_num_threads(),
        },
        "step_us": runs,
    }


def _draft_step(loaded: LoadedModel, length: int) -> Callable[[], object]:
    """Return a step that feeds one known token and three draft tokens: no token is accepted."""
    state = SharingRunnerState(max_num_seqs=1, max_blocks_per_request=200)
    history = _history(length - 1)
    block_ids = list(range(1, 1 + -(-(length + 50) // 16)))
    tokens, params = history.prompt_token_ids, history.params
    state.admit(NewRequestData(history.req_id, tokens, params, 0, (block_ids,)))
    request, rows = state.requests[history.req_id], state.rows_of([history.req_id])
    cache = allocate_kv_cache(loaded, 200, 16)
    proposer = DraftModelProposer(loaded.model, cache, TorchAttentionBackend(), state)

    def step() -> object:
        if request.num_tokens < length + 40:
            state.num_tokens[rows] = state.write_tokens(rows, state.num_tokens[rows], [[5]])
        return proposer.propose([_follow(request)], [4])

    step()
    return step
