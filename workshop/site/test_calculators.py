"""The site's calculators in Chromium: their arithmetic is the book's, and a reader sees it.

Each comparison draws 30 inputs from a seed, edges included, and asks the JavaScript and the Python.
Numbers below 2^53 are exact in both; powers may differ in the last bit."""

from __future__ import annotations

import json
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
from common.models.model_config import SUPPORTED_ARCHITECTURES, ModelConfig
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

PAGE = """<!doctype html><html lang="{language}"><meta charset="utf-8"><title>t</title>
<style>{css}</style><script>{script}</script>{divs}"""
OpenCalculators = Callable[[str], "Page"]


@pytest.fixture
def opened(open_page: OpenPage, tmp_path: Path) -> OpenCalculators:
    """`opened("zh-CN")`: a page in that language with all calculators, 390 pixels wide."""

    def opened(language: str) -> Page:
        css, script = (
            (STATIC / f"calculators.{kind}").read_text("utf-8") for kind in ("css", "js")
        )
        divs = "".join(f'<div class="calculator" data-calculator="{name}"></div>' for name in NAMES)
        text = PAGE.format(language=language, css=css, script=script, divs=divs)
        (tmp_path / "page.html").write_text(text, encoding="utf-8")
        return open_page(tmp_path / "page.html", 390)

    return opened


@pytest.fixture
def page(opened: OpenCalculators) -> Page:
    return opened("en")


# -- the arithmetic


def random_config(rng: random.Random, architecture: str, chance: float) -> dict[str, Any]:
    """Fields of a `config.json`, the optional ones by chance, of a model that is quickly made."""
    num_kv_heads, head_dim = rng.choice([1, 2, 3, 8]), 2 * rng.randint(1, 64)
    num_heads, num_layers = num_kv_heads * rng.choice([1, 2, 4, 7]), rng.choice([1, 2, 6, 7, 31])
    config: dict[str, Any] = {
        "architectures": [architecture],
        "num_hidden_layers": num_layers,
        "hidden_size": num_heads * head_dim,
        "intermediate_size": rng.randint(1, 500),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "vocab_size": rng.randint(1, 1000),
        "max_position_embeddings": 64,
    }
    kinds = ["full_attention", "sliding_attention"]
    optional: dict[str, Any] = {
        "head_dim": 2 * rng.randint(1, 64),
        "tie_word_embeddings": rng.random() < 0.5,
        "sliding_window": rng.choice([1, 2, 17, 512, 4096]),
    }
    if architecture.startswith("Llama"):
        optional["sliding_window"] = None
    if architecture.startswith(("Llama", "Olmo3")) and num_heads == num_kv_heads:
        del config["num_key_value_heads"]
    if architecture.startswith("Qwen"):
        config["use_sliding_window"] = rng.random() < 0.7
        optional["max_window_layers"] = rng.randint(0, num_layers)
    if architecture.startswith("Gemma3"):
        optional["sliding_window_pattern"] = rng.randint(1, 7)
    if architecture.startswith(("Gemma3", "Olmo3")):
        optional["layer_types"] = [rng.choice(kinds) for _ in range(num_layers)]
    if architecture.startswith(("Qwen3Moe", "Mixtral")):
        number = rng.randint(1, 9)
        name = "num_local_experts" if rng.random() < 0.5 else "num_experts"
        config["num_local_experts" if architecture.startswith("Mixtral") else name] = number
        config["num_experts_per_tok"] = rng.randint(1, number)
    if architecture.startswith("Qwen3Moe"):
        optional["moe_intermediate_size"] = rng.randint(1, 99)
        optional["decoder_sparse_step"] = rng.choice([1, 2, 5])
        optional["mlp_only_layers"] = rng.sample(range(num_layers), num_layers // 2)
    return config | {name: value for name, value in optional.items() if rng.random() < chance}


def random_models(
    seed: int, num_cases: int = NUM_CASES
) -> list[tuple[dict[str, Any], DecoderModel]]:
    """Configurations of all families in turn, and their models without weights. The first of each
    family has many layers, and every optional field has its default."""
    rng, found = random.Random(seed), []
    num_families = len(SUPPORTED_ARCHITECTURES)
    for i in range(num_cases):
        architecture = SUPPORTED_ARCHITECTURES[i % num_families]
        fields = random_config(rng, architecture, chance=0.6 if i >= num_families else 0)
        if i < num_families:
            fields |= {"num_hidden_layers": 31, "use_sliding_window": True}
        found.append((fields, DecoderModel(ModelConfig.from_hf(fields), torch.bfloat16, "meta")))
    return found


def test_a_config_json_is_read_as_the_engine_reads_it(page: Page) -> None:
    models = random_models(1, 2 * NUM_CASES)
    known = page.evaluate("bookCalculators.MODELS")
    assert len(known) == 8
    for fields in known.values():
        config = ModelConfig.from_hf(fields | {"max_position_embeddings": 64})
        models.append((fields, DecoderModel(config, torch.bfloat16, "meta")))
    shapes, counts = page.evaluate(
        """(all) => {
            const shapes = all.map(bookCalculators.readConfig);
            return [shapes, shapes.map(bookCalculators.countWeights)];
        }""",
        [fields for fields, _ in models],
    )
    for (fields, model), shape, count in zip(models, shapes, counts, strict=True):
        config, experts = model.config, model.config.experts
        num_layers = config.num_hidden_layers
        assert shape["layers"] == num_layers and shape["hidden"] == config.hidden_size, fields
        assert shape["heads"] == config.num_attention_heads, fields
        assert shape["kvHeads"] == config.num_key_value_heads, fields
        assert shape["headDim"] == config.head_dim, fields
        assert shape["windows"] == list(config.layer_windows or [None] * num_layers), fields
        found = shape["experts"] if shape["experts"] and shape["experts"]["layers"] else None
        assert found == (
            experts
            and {
                "number": experts.num_experts,
                "active": experts.num_active,
                "inner": experts.intermediate_size,
                "layers": len(experts.layers),
            }
        ), fields
        assert count["every"] + experts_of(count, found) == num_weights(model), fields
        assert count["all"] == num_matrix_weights(model), fields


def num_weights(model: DecoderModel) -> int:
    """Weights of the matrices that are multiplied, each once."""
    return sum(matrix.shape.numel() for matrix in linear_layers(model))


def experts_of(count: dict[str, int], experts: dict[str, int] | None) -> int:
    return experts["number"] * count["expert"] if experts else 0


def test_requests_fit_as_in_the_engine_on_one_gpu_and_on_many(page: Page) -> None:
    """Each rank sizes its own part, and its blocks are a part of the request's."""
    rng, cases = random.Random(8), list[dict[str, Any]]()
    for fields, model in random_models(9):
        is_whole = fields["architectures"] == ["Olmo3ForCausalLM"]  # the engine does not divide it
        possible = [1] if is_whole else [n for n in range(1, 57) if divides(model.config, n)]
        num_gpus = rng.choice(possible)
        if fields["architectures"] == ["Qwen3MoeForCausalLM"]:
            fields.setdefault("moe_intermediate_size", 768)
        sizes = ("intermediate_size", "moe_intermediate_size", "vocab_size")
        fields |= {name: num_gpus * fields[name] for name in sizes if name in fields}
        settings = {
            "itemsize": rng.choice(list(DTYPES)),
            "blockSize": rng.choice([1, 16]),
            "length": rng.randint(1, 20_000),
            "stepTokens": rng.randint(1, 3000),
        }
        memory = {"total": rng.randint(1 << 24, 1 << 34), "share": rng.choice([0.5, 0.9, 1])}
        others = rng.randint(0, 1 << 24)
        case = {"gpus": num_gpus, "others": others, "settings": settings, "fields": fields}
        cases.append(memory | case)
    answers = page.evaluate(
        """(cases) => cases.map(({total, share, others, gpus, settings, fields}) => {
            const model = bookCalculators.readConfig(fields);
            const shape = bookCalculators.onGPUs(model, gpus);
            const {all} = bookCalculators.countWeights(shape);
            const bytes = bookCalculators.bytesForKV(total, share, 2 * all, others, gpus);
            const fit = bookCalculators.fitRequests(shape, {bytes, ...settings});
            const token = bookCalculators.kvBytesPerToken(model, settings.itemsize);
            return {all, token, possible: bookCalculators.numbersOfGPUs(model), ...fit};
        })""",
        cases,
    )
    num_fitting, num_repeated = 0, 0
    for case, answer in zip(cases, answers, strict=True):
        config, num_gpus = ModelConfig.from_hf(case["fields"]), case["gpus"]
        heads = range(1, config.num_attention_heads + 1)
        if case["fields"]["architectures"] != ["Olmo3ForCausalLM"]:
            assert answer["possible"] == [n for n in heads if divides(config, n)], case
        parts = [rank_model(config, torch.bfloat16, num_gpus, rank) for rank in range(num_gpus)]
        weights = [num_matrix_weights(part) for part in parts]
        assert answer["all"] == sum(weights), case
        peak = 2 * max(weights) + case["others"]
        before = MemoryReading(case["total"], 0, 2 * max(weights), 0)
        after = MemoryReading(case["total"], case["total"] - peak, peak, peak)
        available = remaining_bytes(before, after, 0, case["share"])
        dtype = DTYPES[case["settings"]["itemsize"]]
        of_dtype = rank_model(config, dtype, num_gpus, 0)
        weight = SimpleNamespace(embed_weight=SimpleNamespace(dtype=dtype))
        loaded: Any = SimpleNamespace(config=config, model=weight)
        assert answer["token"] == kv_bytes_per_token(loaded), case
        budget, per_request = kv_budget_of(of_dtype, case["settings"], available)
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
        budget = size_kv_cache(cache.kv_bytes_per_block, *limits, available, per_request)
    except ValueError as failure:
        assert "lower max_model_len" in str(failure)
        return 0, per_request
    return budget.num_blocks, per_request


def test_the_floor_of_a_decode_step_is_that_of_the_gpu_report(page: Page) -> None:
    rng, cases = random.Random(4), list[dict[str, Any]]()
    models = random_models(5)
    for fields, _ in models:
        settings = {
            "requests": rng.choice([1, 2, 64, rng.randint(1, 1000)]),
            "context": rng.choice([1, 2048, rng.randint(1, 100_000)]),
            "weightBytes": rng.choice([0.5, 1, 2, 4]),
            "kvBytes": rng.choice([1, 2, 4]),
            "bandwidth": rng.choice([18.3, 3350, rng.uniform(1, 8000)]),
            "rate": rng.choice([0.5, 989, rng.uniform(0.01, 2000)]),
        }
        cases.append({"settings": settings, "fields": fields})
    answers = page.evaluate(
        """(cases) => cases.map(({settings, fields}) =>
            bookCalculators.decodeFloor(bookCalculators.readConfig(fields), settings))""",
        cases,
    )
    bounds = set()
    for case, (_, model), answer in zip(cases, models, answers, strict=True):
        settings = case["settings"]
        cost = cost_of(model, settings)
        assert answer["bytes"] == pytest.approx(cost[0], rel=1e-12), case
        assert answer["operations"] == pytest.approx(cost[1], rel=1e-12), case
        ceilings = settings["bandwidth"] * 1e6, settings["rate"] * 1e9
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


# -- the page

GEMMA = {
    "architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 6, "hidden_size": 64,
    "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
    "vocab_size": 100, "sliding_window": 512, "max_position_embeddings": 64,
}  # fmt: skip
FILES = {  # a config.json that is wrong, and what is said
    '{"architectures": ["GptOssForCausalLM"]}': "names GptOssForCausalLM. Known are Qwen3, Qwen2,",
    '{"architectures": []}': "This config.json names no architecture. Known are Qwen3, Qwen2,",
    "{": "The file is not JSON",
    json.dumps(GEMMA | {"hidden_size": None}): "must be a whole number > 0, got null",
    json.dumps(
        GEMMA | {"num_attention_heads": 3, "num_key_value_heads": 2}
    ): "must divide 3, got 2",
}


def test_a_reader_gets_the_engines_number_for_a_model_and_for_a_file(page: Page) -> None:
    """Chapter 2's example: Qwen3-0.6B needs 112 KiB for a token and 224 MiB for 2,048 tokens."""
    kv = page.locator("[data-calculator=kv]")
    answer, formulas, file = kv.locator("output"), kv.locator("dl"), kv.locator("input[type=file]")
    kv.get_by_label("Model", exact=True).select_option("Qwen3-0.6B")
    kv.get_by_label("Weights in").select_option("0")
    labels = ("Memory of each (GiB)", "Share used", "Activations etc. (GiB)")
    for label, value in zip(labels, ("4", "1", "0")):
        kv.get_by_label(label).fill(value)
    number = requests_in_4_gib(page.evaluate("bookCalculators.MODELS")["Qwen3-0.6B"])
    said = f"4 GiB of KV memory hold {number} requests of 2,048 tokens. A request takes 224 MiB"
    assert said in answer.inner_text()
    assert "2 × 28 × 8 × 128 × 2 = 114,688 B = 112 KiB" in formulas.inner_text()
    choose(file, json.dumps(GEMMA))
    answer.get_by_text(f"{requests_in_4_gib(GEMMA):,}").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    for text, complaint in FILES.items():
        choose(file, text)
        answer.get_by_text(complaint).wait_for()
        assert formulas.inner_text() == ""
    kv.get_by_label("Activations etc. (GiB)").fill("")
    assert "Activations etc." in answer.inner_text()
    assert kv.locator("input:invalid").count() == 1


def test_a_chinese_reader_is_answered_in_chinese(opened: OpenCalculators) -> None:
    kv = opened("zh-CN").locator("[data-calculator=kv]")
    kv.get_by_label("模型", exact=True).select_option("Qwen3-0.6B")
    assert "2,048 token 的请求。一个请求占" in kv.locator("output").inner_text()


def choose(files: Any, text: str) -> None:
    chosen = {"name": "config.json", "mimeType": "application/json", "buffer": text.encode()}
    files.set_input_files([chosen])


def requests_in_4_gib(fields: dict[str, Any]) -> int:
    settings = {"length": 2048, "blockSize": 16, "itemsize": 2, "stepTokens": 2048}
    config = ModelConfig.from_hf(fields | {"max_position_embeddings": 64})
    model = DecoderModel(config, torch.bfloat16, "meta")
    num_blocks, per_request = kv_budget_of(model, settings, BytesForKV(4 << 30, "4 GiB"))
    return (num_blocks - 1) // per_request


def test_what_is_typed_is_answered_at_once(page: Page) -> None:
    speculation = page.locator("[data-calculator=speculation]")
    speculation.get_by_label("Draft pass c (steps)").press_sequentially("9")  # 0.19
    for acceptance, verdict in (0.8, "pays"), (0.1, "loses"):
        speculation.get_by_label("Acceptance a").fill(str(acceptance))
        times = expected_speedup(acceptance, 4, 0.19, 1.2)
        assert f"{verdict}: {times:.3g} times" in speculation.locator("output").inner_text()


def test_every_calculator_is_on_the_page_of_calculators_and_in_one_chapter() -> None:
    mark, div = (r"<!-- calculator: (\w+) -->", r'data-calculator="(\w+)"')
    for suffix in (".md", ".zh.md"):
        chapters = [path.read_text("utf-8") for path in ROOT.glob(f"0*/README{suffix}")]
        assert sorted(re.findall(mark, "".join(chapters))) == sorted(NAMES)
        page = STATIC.parent / "pages" / f"CALCULATORS{suffix}"
        assert re.findall(div, page.read_text("utf-8")) == list(NAMES)
