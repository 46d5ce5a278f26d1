"""The site's calculators in Chromium: their arithmetic is the book's, and a reader sees it.

Each comparison draws 30 inputs from a seed, edges included, and asks the JavaScript and the Python.
Numbers below 2^53 are exact in both; powers may differ in the last bit."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from common.models.linear import linear_layers
from common.models.loader import LoadedModel
from common.models.model import DecoderModel
from common.models.model_config import ModelConfig
from common.models.ranks import Ranks
from common.parallel.sharded_model import ShardedModel, rank_config
from common.runner.kv_sizing import allocate_kv_cache
from draft_acceptance import expected_speedup, expected_tokens_per_pass
from grouped_kv_memory import max_blocks
from kv_budget import BytesForKV, MemoryReading, remaining_bytes, size_kv_cache
from workshop.book.path import ROOT
from workshop.measure.bench.bench_roofline import kv_bytes_per_token
from workshop.measure.bench.gpu_work import attention_cost, decode_cost, floor_ms
from workshop.watch.conftest import OpenPage

if TYPE_CHECKING:
    from playwright.sync_api import Page

STATIC = Path(__file__).parent / "static"
NAMES = ("kv", "step", "speculation")
DTYPES = {1: torch.int8, 2: torch.bfloat16, 4: torch.float32}
NUM_CASES = 30
KINDS = ("css", "js")
FAMILIES = ("Qwen3", "Gemma3", "Qwen3Moe", "Mistral")
SIZES = {
    "layers": "num_hidden_layers", "hidden": "hidden_size", "inner": "intermediate_size",
    "heads": "num_attention_heads", "kvHeads": "num_key_value_heads", "headDim": "head_dim",
    "vocab": "vocab_size", "isTied": "tie_word_embeddings",
}  # fmt: skip

PAGE = """<!doctype html><html lang="{language}"><meta charset="utf-8"><title>t</title>
<style>{css}</style><script>{script}</script>{divs}"""
OpenCalculators = Callable[[str], "Page"]


@pytest.fixture
def opened(open_page: OpenPage, tmp_path: Path) -> OpenCalculators:
    """`opened("zh-CN")`: a page in that language with all calculators, 390 pixels wide."""

    def opened(language: str) -> Page:
        css, script = ((STATIC / f"calculators.{end}").read_text("utf-8") for end in KINDS)
        divs = "".join(f'<div class="calculator" data-calculator="{name}"></div>' for name in NAMES)
        text = PAGE.format(language=language, css=css, script=script, divs=divs)
        (tmp_path / "page.html").write_text(text, encoding="utf-8")
        return open_page(tmp_path / "page.html", 390)

    return opened


@pytest.fixture
def page(opened: OpenCalculators) -> Page:
    return opened("en")


def random_model(rng: random.Random, number: int) -> DecoderModel:
    """Without weights; the families in turn, with windows, with experts, tied, or none of these."""
    family = FAMILIES[number % len(FAMILIES)]
    num_kv_heads, num_layers = rng.choice([1, 2, 3, 8]), rng.choice([1, 6, 7, 31])
    num_heads = num_kv_heads * rng.choice([1, 2, 4, 7])
    num_experts = rng.randint(1, 9)
    fields = {
        "num_hidden_layers": num_layers,
        "hidden_size": 2 * num_heads * rng.randint(1, 16),
        "intermediate_size": rng.randint(1, 500),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": 2 * rng.randint(1, 64),
        "vocab_size": rng.randint(1, 1000),
        "tie_word_embeddings": rng.random() < 0.5,
        "sliding_window": rng.choice([1, 17, 512, 4096]),
    }
    experts = {
        "num_experts": num_experts,
        "num_experts_per_tok": rng.randint(1, num_experts),
        "moe_intermediate_size": rng.randint(1, 99),
        "mlp_only_layers": rng.sample(range(num_layers), num_layers // 2),
    }
    return model_of(family, fields | (experts if "Moe" in family else {}))


def model_of(family: str, fields: dict[str, Any]) -> DecoderModel:
    given = {"architectures": [f"{family}ForCausalLM"], "max_position_embeddings": 64}
    return DecoderModel(ModelConfig.from_hf(fields | given), torch.bfloat16, "meta")


def shape_of(config: ModelConfig) -> dict[str, Any]:
    """The model as the JavaScript has it."""
    experts = config.experts
    return {js: getattr(config, name) for js, name in SIZES.items()} | {
        "gpus": 1,
        "windows": list(config.layer_windows or [None] * config.num_hidden_layers),
        "experts": experts
        and {
            "number": experts.num_experts,
            "active": experts.num_active,
            "inner": experts.intermediate_size,
            "layers": len(experts.layers),
        },
    }


def test_the_models_are_those_that_the_engine_reads(page: Page) -> None:
    shapes, counts = page.evaluate(
        """() => [bookCalculators.MODELS,
            Object.values(bookCalculators.MODELS).map(bookCalculators.countWeights)]"""
    )
    assert len(shapes) == 8
    for (name, shape), count in zip(shapes.items(), counts, strict=True):
        window = next(filter(None, shape["windows"]), None)
        fields = {field: shape[js] for js, field in SIZES.items()} | {"sliding_window": window}
        if experts := shape["experts"]:
            number, active, inner = experts["number"], experts["active"], experts["inner"]
            fields |= {"num_experts_per_tok": active}
            qwen = {"num_experts": number, "moe_intermediate_size": inner}
            fields |= qwen if "Qwen" in name else {"num_local_experts": number}
        family = "Qwen3Moe" if name.endswith("A3B") else name.replace("Gemma 3", "Gemma3")
        model = model_of(re.split("[- ]", family)[0], fields)
        assert shape_of(model.config) == shape, name
        assert count["every"] + experts_of(count, experts) == num_weights(model), name
        assert count["all"] == num_matrix_weights(model), name


def num_weights(model: DecoderModel) -> int:
    """Weights of the matrices that are multiplied, each once."""
    return sum(matrix.shape.numel() for matrix in linear_layers(model))


def experts_of(count: dict[str, int], experts: dict[str, int] | None) -> int:
    return experts["number"] * count["expert"] if experts else 0


def test_requests_fit_as_in_the_engine_on_one_gpu_and_on_many(page: Page) -> None:
    """Each rank sizes its own part, and its blocks are a part of the request's."""
    rng, cases = random.Random(8), []
    for number in range(NUM_CASES):
        config = random_model(rng, number).config
        num_gpus = rng.choice([n for n in range(1, 57) if divides(config, n)])
        sizes = {"intermediate_size": num_gpus * config.intermediate_size}
        config = replace(config, vocab_size=num_gpus * config.vocab_size, **sizes)
        if config.experts:
            inner = num_gpus * config.experts.intermediate_size
            config = replace(config, experts=replace(config.experts, intermediate_size=inner))
        settings = {
            "itemsize": rng.choice(list(DTYPES)),
            "blockSize": rng.choice([1, 16]),
            "length": rng.randint(1, 20_000),
            "stepTokens": rng.randint(1, 3000),
        }
        memory = {"total": rng.randint(1 << 24, 1 << 34), "share": rng.choice([0.5, 0.9, 1])}
        memory |= {"gpus": num_gpus, "others": rng.randint(0, 1 << 24)}
        cases.append((config, settings, memory))
    answers = page.evaluate(
        """(cases) => cases.map(([model, settings, {total, share, others, gpus}]) => {
            const shape = bookCalculators.onGPUs(model, gpus);
            const {all} = bookCalculators.countWeights(shape);
            const bytes = bookCalculators.bytesForKV(total, share, 2 * all, others, gpus);
            const fit = bookCalculators.fitRequests(shape, {bytes, ...settings});
            const token = bookCalculators.kvBytesPerToken(model, settings.itemsize);
            return {all, token, possible: bookCalculators.numbersOfGPUs(model), ...fit};
        })""",
        [(shape_of(config), *case) for config, *case in cases],
    )
    num_fitting, num_repeated = 0, 0
    for case, answer in zip(cases, answers, strict=True):
        config, settings, memory = case
        num_gpus, dtype = memory["gpus"], DTYPES[settings["itemsize"]]
        heads = range(1, config.num_attention_heads + 1)
        assert answer["possible"] == [n for n in heads if divides(config, n)], case
        parts = [rank_model(config, torch.bfloat16, num_gpus, rank) for rank in range(num_gpus)]
        weights = [num_matrix_weights(part) for part in parts]
        assert answer["all"] == sum(weights), case
        peak = 2 * max(weights) + memory["others"]
        before = MemoryReading(memory["total"], 0, 2 * max(weights), 0)
        after = MemoryReading(memory["total"], memory["total"] - peak, peak, peak)
        available = remaining_bytes(before, after, 0, memory["share"])
        weight = SimpleNamespace(embed_weight=SimpleNamespace(dtype=dtype))
        loaded: Any = SimpleNamespace(config=config, model=weight)
        assert answer["token"] == kv_bytes_per_token(loaded), case
        of_dtype = rank_model(config, dtype, num_gpus, 0)
        budget, per_request = kv_budget_of(of_dtype, settings, available)
        assert answer["perRequest"] == per_request, case
        assert answer["requests"] == max(0, budget - 1) // per_request, case
        num_fitting += budget > 0
        num_repeated += num_gpus > config.num_key_value_heads
    assert num_fitting > 5 and num_repeated > 5


def divides(config: ModelConfig, num_gpus: int) -> bool:
    """Whether the engine divides a model with these heads."""
    others = {"intermediate_size": num_gpus, "vocab_size": num_gpus, "experts": None}
    try:
        rank_config(replace(config, **others), Ranks(num_gpus))
    except ValueError:
        return False
    return True


def rank_model(config: ModelConfig, dtype: torch.dtype, num_gpus: int, rank: int) -> ShardedModel:
    collectives: Any = SimpleNamespace(ranks=Ranks(num_gpus, rank=rank))
    return ShardedModel(config, dtype, "meta", collectives)


def num_matrix_weights(model: DecoderModel) -> int:
    named = model.named_parameters()
    return sum(each.numel() for name, each in named if each.ndim > 1 and "norm" not in name)


def kv_budget_of(of_dtype: Any, settings: dict[str, Any], available: BytesForKV) -> tuple[int, int]:
    """The blocks that the engine would take, 0 if no request fits, and the blocks of a request. The
    steps are those of `make_kv_cache`."""
    length, block_size = settings["length"], settings["blockSize"]
    of_dtype.group_layers(length)
    cache = allocate_kv_cache(LoadedModel(of_dtype, of_dtype.config, ()), 1, block_size)
    windows = of_dtype.groups.windows
    per_request = max_blocks(length, block_size, windows, settings["stepTokens"])
    limits = block_size, 1 << 50, length
    try:
        num_blocks = size_kv_cache(cache.kv_bytes_per_block, *limits, available, per_request)
    except ValueError as failure:
        assert "lower max_model_len" in str(failure)
        return 0, per_request
    return num_blocks, per_request


def test_the_floor_of_a_decode_step_is_that_of_the_gpu_report(page: Page) -> None:
    rng = random.Random(4)
    models = [random_model(rng, number) for number in range(NUM_CASES)]
    cases = [
        {
            "requests": rng.choice([1, 2, 64, rng.randint(1, 1000)]),
            "context": rng.choice([1, 2048, rng.randint(1, 100_000)]),
            "weightBytes": rng.choice([0.5, 1, 2, 4]),
            "kvBytes": rng.choice([1, 2, 4]),
            "bandwidth": rng.choice([18.3, 3350, rng.uniform(1, 8000)]),
            "rate": rng.choice([0.5, 989, rng.uniform(0.01, 2000)]),
        }
        for _ in models
    ]
    answers = page.evaluate(
        "(cases) => cases.map(([shape, settings]) => bookCalculators.decodeFloor(shape, settings))",
        [(shape_of(model.config), settings) for model, settings in zip(models, cases)],
    )
    bounds = set()
    for case, model, answer in zip(cases, models, answers, strict=True):
        cost = cost_of(model, case)
        assert answer["bytes"] == pytest.approx(cost[0], rel=1e-12), case
        assert answer["operations"] == pytest.approx(cost[1], rel=1e-12), case
        ceilings = case["bandwidth"] * 1e6, case["rate"] * 1e9
        assert answer["ms"] == pytest.approx(floor_ms(cost, ceilings), rel=1e-6), case
        bounds.add("memory" if answer["memoryMs"] > answer["arithmeticMs"] else "arithmetic")
    assert bounds == {"memory", "arithmetic"}


def cost_of(model: DecoderModel, settings: dict[str, Any]) -> tuple[float, float]:
    """Bytes and operations of a step: `decode_cost`'s for a model of matrices of 16 bits, without
    experts or windows, and what changes with each of these."""
    config, n, context = model.config, settings["requests"], settings["context"]
    read = used = float(num_weights(model))
    if (experts := config.experts) is not None:
        share = 1 - experts.num_active / experts.num_experts  # that a token does not use
        all_experts = len(experts.layers) * experts.num_experts
        all_experts *= 3 * config.hidden_size * experts.intermediate_size
        read -= all_experts * share**n  # as common/models/experts says
        used -= all_experts * share
    windows = config.layer_windows or (None,) * config.num_hidden_layers
    seen = [min(context, window or context) for window in windows]
    if config.layer_windows or experts:
        attention = [attention_cost(config, n, length) for length in seen]
        num_bytes, operations = decode_cost(replace(config, num_hidden_layers=0), 0, n, 0)
        num_bytes += 2 * read + sum(cost[0] for cost in attention)
        operations += 2 * n * used + sum(cost[1] for cost in attention)
    else:
        num_bytes, operations = decode_cost(config, num_weights(model), n, context)
    kv_numbers = 2 * n * sum(seen) * config.num_key_value_heads * config.head_dim
    num_bytes += (settings["weightBytes"] - 2) * read + (settings["kvBytes"] - 2) * kv_numbers
    return num_bytes, operations


def test_the_gain_of_speculation_is_chapter_5s(page: Page) -> None:
    rng = random.Random(6)
    cases = [(0.0, 0, 0.0, 1.0), (1.0, 7, 0.3, 1.2), (1.0, 0, 0.0, 0.5), (0.0, 5, 1.0, 2.0)]
    while len(cases) < NUM_CASES:
        sizes = rng.random(), rng.choice([0, 1, rng.randint(0, 60)])
        cases.append((*sizes, rng.uniform(0, 2), rng.uniform(0.01, 5)))
    answers = page.evaluate(
        """(cases) => cases.map(([a, k, c, v]) => [bookCalculators.expectedTokens(a, k),
            bookCalculators.expectedSpeedup(a, k, c, v)])""",
        cases,
    )
    for case, (tokens, speedup) in zip(cases, answers, strict=True):
        assert tokens == pytest.approx(expected_tokens_per_pass(*case[:2]), rel=1e-12), case
        assert speedup == pytest.approx(expected_speedup(*case), rel=1e-12), case


def test_a_reader_gets_the_engines_number(opened: OpenCalculators) -> None:
    """Chapter 2's example: Qwen3-0.6B needs 112 KiB for a token and 224 MiB for 2,048 tokens."""
    page = opened("en")
    kv = page.locator("[data-calculator=kv]")
    answer, formulas = kv.locator("output"), kv.locator("dl")
    kv.get_by_label("Model", exact=True).select_option("Qwen3-0.6B")
    kv.get_by_label("Weights in").select_option("0")
    labels = ("Memory of each (GiB)", "Share used", "Activations etc. (GiB)")
    for label, value in zip(labels, ("4", "1", "0")):
        kv.get_by_label(label).fill(value)
    said = "4 GiB of KV memory hold 18 requests of 2,048 tokens. A request takes 224 MiB"
    assert said in answer.inner_text()
    assert "2 × 28 × 8 × 128 × 2 = 114,688 B = 112 KiB" in formulas.inner_text()
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    kv.get_by_label("Activations etc. (GiB)").fill("")
    assert "Activations etc." in answer.inner_text()
    assert kv.locator("input:invalid").count() == 1
    speculation = page.locator("[data-calculator=speculation]")
    for acceptance, verdict in (0.8, "pays"), (0.1, "loses"):
        speculation.get_by_label("Acceptance a").fill(str(acceptance))
        times = expected_speedup(acceptance, 4, 0.1, 1.2)
        assert f"{verdict}: {times:.3g} times" in speculation.locator("output").inner_text()
    kv = opened("zh-CN").locator("[data-calculator=kv]")
    kv.get_by_label("模型", exact=True).select_option("Qwen3-0.6B")
    assert "2,048 token 的请求。一个请求占" in kv.locator("output").inner_text()


def test_every_calculator_is_on_the_page_of_calculators_and_in_one_chapter() -> None:
    mark, div = (r"<!-- calculator: (\w+) -->", r'data-calculator="(\w+)"')
    for suffix in (".md", ".zh.md"):
        chapters = [path.read_text("utf-8") for path in ROOT.glob(f"0*/README{suffix}")]
        assert sorted(re.findall(mark, "".join(chapters))) == sorted(NAMES)
        page = STATIC.parent / "pages" / f"CALCULATORS{suffix}"
        assert re.findall(div, page.read_text("utf-8")) == list(NAMES)
