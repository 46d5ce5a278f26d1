"""The whole report, rehearsed: every line that a GPU will meet has run here."""

from __future__ import annotations

import math
import re
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch

from common.engine import LLMEngine
from common.engine_config import EngineConfig
from common.workshop.bench import gpu_budget, gpu_command, gpu_sections
from common.workshop.bench.bench_record import ROOT, read_record, write_record
from common.workshop.bench.gpu_budget import Planned, Section, run_sections
from common.workshop.bench.gpu_command import RECORDS, main, parse, record_path
from common.workshop.bench.gpu_engine import NUM_WARM_STEPS, Engines, paged_runner, time_decode
from common.workshop.bench.gpu_inputs import (
    FULL,
    REHEARSAL,
    TINY_MODEL,
    Lab,
    decodes,
    make_caches,
    num_blocks_of,
    paged_inputs,
    spoil_unused,
)
from common.workshop.bench.gpu_kernels import GROUPS
from common.workshop.bench.gpu_sections import judge, plan_sections
from common.workshop.bench.gpu_table import NOTHING, aims_of, readme_text, render
from common.workshop.bench.random_weights import random_model

CPU = torch.device("cpu")
SAMPLE = "ceilings,kernels,overlap: workload,transformers,ceilings again"
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="a rehearsal is of a CPU")


def a_lab(seed: int = 0) -> Lab:
    return Lab(CPU, REHEARSAL, seed)


@pytest.fixture(scope="module")
def sampled(tmp_path_factory) -> dict:
    """The record of some sections."""
    path = tmp_path_factory.mktemp("report") / "record.json"
    options = ["--rehearse", "--seed", "1", "--budget", "900", "--record", str(path)]
    assert main([*options, "--sections", SAMPLE]) == 0
    return read_record(path)


@interpreted
def test_a_rehearsal_of_some_sections_runs_to_its_end(sampled, capsys) -> None:
    assert list(sampled["sections"]) == SAMPLE.split(",")
    for name, section in sampled["sections"].items():
        assert section["status"] == "done" and section["errors"] == [], (name, section)
    (served,) = sampled["sections"]["overlap: workload"]["results"]["runs"]
    (run,) = sampled["sections"]["transformers"]["results"]["runs"]
    assert run["output_tokens"] == served["output_tokens"] > 0
    assert sampled["is_rehearsal"] and "these numbers say nothing" in render(sampled)
    assert len(sampled["environment"]["commit"]) == 40 and sampled["config"]["seed"] == 1


@interpreted
def test_every_kernel_is_compared_where_it_is_timed(sampled) -> None:
    results = sampled["sections"]["kernels"]["results"]
    kernels = {row["kernel"] for row in results["cells"]}
    assert kernels == {check["kernel"] for check in results["checks"]}
    assert {"attention v1", "attention v3", "write_kv", "rejection", "sampling: top-p"} <= kernels
    assert all(check["is_right"] for check in results["checks"])
    for row in results["cells"]:
        assert min(row["ms"]) > 0 and row["bytes"] > 0 and row["floor_ms"] > 0


@interpreted
@pytest.mark.slow
def test_a_rehearsal_runs_every_section_to_its_end(tmp_path) -> None:
    path = tmp_path / "record.json"
    assert main(["--rehearse", "--budget", "900", "--record", str(path)]) == 0
    sections = read_record(path)["sections"]
    assert list(sections) == list(plan_sections(a_lab()))
    assert {(s["status"], *s["errors"]) for s in sections.values()} == {("done",)}
    checks = sections["numbers"]["results"]["checks"]
    for name in ("attention v1", "attention v2", "attention v3", "add_rms_norm"):
        dtypes = {check["dtype"] for check in checks if check["kernel"] == name}
        assert dtypes == {"float32", "bfloat16", "float16"}
    for mode in ("eager", "graphs", "overlap"):
        served = sections[f"{mode}: workload"]["results"]
        assert served["engine"]["has_graphs"] is (mode != "eager")
        assert served["runs"]
        waits = sections[f"{mode}: waits"]["results"]
        assert waits["meant"] == waits["num_steps"] > 0 and waits["hidden"] == 0
        steps = sections[f"{mode}: decode steps"]
        assert [row["cell"] for row in steps["results"]["steps"]] == [[2, 20]]
        assert "do not fit: 3 x (1, 20)" in steps["notes"][0]
    assert [r["cell"] for r in sections["the model alone"]["results"]["steps"]] == [[2, 20]]


def test_no_kernel_of_the_book_is_forgotten() -> None:
    """Every function that Triton compiles and that is launched is covered by a group."""
    kernel = r"^@jit\w*(?:\([^()]*(?:\([^()]*\)[^()]*)*\))?\ndef (\w+_kernel)\("
    written = set()
    for path in [*ROOT.glob("[0-9]*/**/*.py"), *ROOT.glob("common/kernels/*.py")]:
        written |= set(re.findall(kernel, path.read_text(encoding="utf-8"), re.MULTILINE))
    assert {"_split_attention_kernel", "_silu_and_multiply_kernel"} <= written
    assert written == {name for group in GROUPS for name in group.covers}


def test_the_sizes_of_a_gpu_are_those_of_the_aims() -> None:
    assert {64, 512, 1} <= {len(batch) for batch in FULL.decodes}
    assert {256, 8192} <= {batch[0][1] for batch in FULL.decodes}
    assert FULL.decodes[0] == FULL.steps[0] == decodes(64, 2048)  # the aims come first
    assert FULL.workload == (256, (100, 1024), (100, 1024))
    longest = max(batch[0][1] for batch in FULL.decodes)
    assert longest < FULL.max_model_len - FULL.num_decode_steps
    plan = plan_sections(Lab(CPU, FULL, 0))
    assert sum(section.share for section in plan.values()) == pytest.approx(1, abs=0.15)
    assert gpu_command.BUDGET_S + gpu_command.PATIENCE_S < 8 * 60


# -- sections


def run(measures: dict, total_s: float = 100.0, record: dict | None = None) -> tuple[dict, list]:
    """The record's sections, and their states as they were written."""
    record, written = record or {"sections": {}}, []

    def write() -> None:
        written.append({name: s["status"] for name, s in record["sections"].items()})

    plan = {name: Planned(1.0, measure) for name, measure in measures.items()}
    run_sections(plan, record, write, total_s)
    return record["sections"], written


def raises(error: BaseException):
    def measure(section: Section) -> None:
        section.results["before"] = 1
        raise error

    return measure


def test_a_section_that_raises_keeps_what_it_has_and_the_others_go_on(capsys) -> None:
    """The record is written before and after each."""
    sections, written = run({"a": raises(KeyError("gone")), "b": lambda s: s.results.update(x=1)})
    assert written == [
        {"a": "running"}, {"a": "failed"},
        {"a": "failed", "b": "running"}, {"a": "failed", "b": "done"},
    ]  # fmt: skip
    assert sections["a"]["results"] == {"before": 1} and sections["b"]["results"] == {"x": 1}
    assert sections["a"]["errors"] == ["the section: KeyError: 'gone'"]
    assert "KeyError" in capsys.readouterr().err


def test_a_part_that_raises_leaves_the_rest_of_its_section() -> None:
    def measure(section: Section) -> None:
        for name in "xyz":
            with section.attempt(name):
                section.results[name] = 1 / (name != "y")
        with section.attempt("a large one"):
            raise torch.OutOfMemoryError

    section = run({"a": measure})[0]["a"]
    assert section["results"] == {"x": 1, "z": 1} and section["status"] == "failed"
    assert section["errors"] == ["y: ZeroDivisionError: division by zero"]
    assert section["notes"] == ["left out, it does not fit in memory: a large one"]


def test_a_section_without_time_is_cut_and_what_is_left_over_goes_to_the_next(monkeypatch) -> None:
    now = [0.0]
    monkeypatch.setattr(gpu_budget, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def measure(section: Section) -> None:
        for i in range(4):
            if section.has_time(f"part {i}"):
                now[0] += 20
                section.results[i] = 1

    first, second, third = run({"a": lambda s: None, "b": measure, "c": measure}, 60.0)[0].values()
    assert first["status"] == "done" and second["status"] == third["status"] == "cut"
    assert list(second["results"]) == [0, 1] and second["seconds"] == 40
    assert second["notes"] == [f"left out, the time was up: part {i}" for i in (2, 3)]
    assert list(third["results"]) == [0] and len(third["notes"]) == 3
    late = run({"a": raises(AssertionError())}, total_s=-1.0)[0]["a"]
    assert late["status"] == "cut" and late["notes"] == ["left out, the time was up: all of it"]


def test_an_interrupt_goes_through_and_what_was_measured_is_there() -> None:
    record: dict = {"sections": {}}
    with pytest.raises(KeyboardInterrupt):
        run({"a": raises(KeyboardInterrupt())}, record=record)
    section = record["sections"]["a"]
    assert section["status"] == "running" and section["results"] == {"before": 1}


# -- inputs and judgement


def test_slots_that_are_no_sequences_are_not_numbers() -> None:
    """That its attention is right, kernels of another kind say in the rehearsal."""
    lengths = ((1, 1), (1, 33), (5, 5), (7, 40))
    lab = a_lab(3)
    inputs = paged_inputs(lab, lengths, make_caches(lab, num_blocks_of(lengths) + 3, torch.float32))
    spoil_unused(inputs)
    for cache in (inputs.key_cache, inputs.value_cache):
        is_number = ~cache.flatten(0, 1).isnan().flatten(1).any(1)
        used = torch.cat([inputs.slots(row) for row in range(len(lengths))])
        assert is_number.nonzero()[:, 0].tolist() == sorted(used.tolist())


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.__setitem__((3, 2), math.nan),
        lambda x: x.__setitem__((3, 2), math.inf),
        lambda x: x[7].zero_(),
        lambda x: x[3, 2].add_(2e-4),  # one number: too little for the norm
        lambda x: x.mul_(1 + 3e-5),
        lambda x: x.resize_(199, 8),
    ],
    ids=["NaN", "infinite", "a row of zeros", "one number", "all a little", "too few"],
)
def test_what_is_wrong_is_judged_wrong(change) -> None:
    torch.manual_seed(0)
    expected = torch.randn(200, 8, dtype=torch.float64)
    wrong = expected.float()
    change(wrong)
    row = judge(wrong, expected)
    assert not row["is_right"] and (row["error"] is None or row["error"] > 1e-6)


def test_what_is_right_is_judged_by_its_dtype() -> None:
    torch.manual_seed(0)
    expected = torch.randn(200, 8, dtype=torch.float64)
    right = expected.float()
    assert judge(right, expected)["is_right"] and judge(right, expected)["error"] < 1e-7
    spoilt = expected.clone().index_fill_(0, torch.tensor([5]), math.nan)
    assert not judge(right, spoilt)["is_right"] and judge(spoilt.float(), spoilt)["is_right"]
    assert judge(expected.bfloat16(), expected)["is_right"]
    assert not judge(expected.bfloat16().float(), expected)["is_right"]
    tokens = torch.arange(5)
    assert judge(tokens, tokens)["is_right"] and judge(right, right)["is_right"]
    assert judge(tokens + (tokens == 3), tokens)["error"] == 1
    assert judge(right, right.clone().add_(1e-5))["error"] > 1000
    zeros = torch.zeros(2, dtype=torch.float64)
    assert not judge(torch.tensor([0.0, math.nan]), zeros)["is_right"]  # NaN for nothing


# -- decode steps


@interpreted
def test_prompts_are_taken_in_without_being_computed() -> None:
    """Every timed step computes one token for each sequence, at the promised number of keys; and
    until then nobody touched keys and values."""
    for overlaps in (False, True):
        config = EngineConfig(
            device="cpu", attention_backend="torch", num_blocks=65, max_num_seqs=4,
            max_num_batched_tokens=16, max_model_len=64, overlap_scheduling=overlaps,
        )  # fmt: skip
        engine = LLMEngine(config, loaded=random_model(TINY_MODEL))
        keys = engine.kv_cache.key_cache[0]
        keys.normal_()
        seen, untouched = [], keys.clone()
        runner = paged_runner(engine)
        forward = runner.forward

        def spy(batch, forward=forward, seen=seen, keys=keys, untouched=untouched):
            if not seen:
                assert torch.equal(keys, untouched)
            seen.append((batch.positions.tolist(), batch.attention[0].seq_lens.tolist()))
            return forward(batch)

        runner.forward = spy
        times = time_decode(engine, a_lab(), decodes(3, 20))
        num_steps = NUM_WARM_STEPS + REHEARSAL.num_decode_steps
        assert len(times) == REHEARSAL.num_decode_steps and not engine.has_unfinished_requests()
        expected = [([19 + i] * 3, [20 + i] * 3) for i in range(num_steps)]
        assert seen[: len(expected)] == expected
        engine.check_invariants()
        engine.close()


def test_a_dropped_engine_gives_its_memory_back() -> None:
    """On a GPU the next one would find none."""
    engines = Engines(a_lab())
    config = EngineConfig(device="cpu", attention_backend="torch", num_blocks=9, max_model_len=64)
    engines.engine = LLMEngine(config, loaded=random_model(TINY_MODEL))
    engine, cache = (weakref.ref(x) for x in (engines.engine, engines.engine.kv_cache))
    engines.drop()
    assert cache() is None and engine() is None and engines.engine is None


# -- the command


@interpreted
def test_a_rehearsal_is_never_a_result(sampled, tmp_path) -> None:
    with pytest.raises(ValueError, match="a rehearsal is no result"):
        readme_text([sampled])
    args = parse(["--rehearse", "--record", str(RECORDS / "gpu_report_x.json")])
    with pytest.raises(ValueError, match="among the results"):
        record_path(args, "x")
    assert record_path(parse(["--rehearse"]), "x").parent == ROOT / "build"
    assert record_path(parse([]), "NVIDIA H200") == RECORDS / "gpu_report_nvidia-h200.json"
    path, page = tmp_path / "record.json", tmp_path / "README.md"
    write_record(path, sampled)
    page.write_text("<!-- table:gpu -->\nas it was\n<!-- /table:gpu -->\n")
    assert main(["--write-readme", "--record", str(path), "--page", str(page)]) == 1
    assert "as it was" in page.read_text()


def test_the_text_shows_the_records_that_are_there() -> None:
    records = [read_record(path) for path in sorted(RECORDS.glob("gpu_report_*.json"))]
    page = (ROOT / "common" / "workshop" / "bench" / "README.md").read_text(encoding="utf-8")
    shown = page.partition("<!-- table:gpu -->\n")[2].partition("\n<!-- /table:gpu -->")[0]
    assert shown == readme_text(records)
    assert records or shown == NOTHING


def test_a_record_of_uncommitted_code_is_not_written_into_the_text() -> None:
    record = a_record()
    clean = record["environment"]
    assert "say nothing" not in readme_text([record])
    for change in ({"is_dirty": True}, {"commit": None}):
        with pytest.raises(ValueError, match="commit, and measure again"):
            readme_text([record | {"environment": clean | change}])


@interpreted
def test_some_sections_are_measured_again_and_the_others_stay(tmp_path, monkeypatch) -> None:
    """After what breaks the device, which nothing measures in that process any more."""
    path, ran = tmp_path / "record.json", []

    def plan(lab: Lab) -> dict[str, Planned]:
        def measure(section: Section, name: str) -> None:
            ran.append(name)
            section.results["n"] = len(ran)
            if len(ran) == 2:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")

        return {name: Planned(1, lambda s, name=name: measure(s, name)) for name in "abc"}

    monkeypatch.setattr(gpu_sections, "plan_sections", plan)
    options = ["--rehearse", "--record", str(path)]
    assert main(options) == 1 and main([*options, "--sections", "b"]) == 0
    assert ran == ["a", "b", "c", "b"]
    sections = read_record(path)["sections"]
    assert [s["results"]["n"] for s in sections.values()] == [1, 4, 3]
    assert {s["status"] for s in sections.values()} == {"done"}
    assert main([*options, "--sections", "b,d"]) == 1


def test_what_is_asked_wrongly_is_said(monkeypatch, capsys) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert main([]) == 1
    assert "TRITON_INTERPRET is set" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse(["--budget", "0"])
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setitem(sys.modules, "triton", object())
    assert main(["--rehearse"]) == 1
    assert "Triton is imported already" in capsys.readouterr().err


# -- the tables


def a_record() -> dict:
    def cell(n: int, context: int, ms: float, kernel: str = "attention v3") -> dict:
        cost = {"bytes": 1, "flops": 1, "floor_ms": 1.0, "is_bound_by_memory": True}
        where = {"cell": [n, context], "what": f"{n} x {context:,}", "is_graph": True}
        return {"group": "attention", "kernel": kernel, "ms": [ms, ms, 9.0], **where, **cost}

    def run(speed: float) -> dict:
        return {"output_tokens_per_s": speed, "num_steps": 1100}

    def section(**results: object) -> dict:
        return {"status": "done", "seconds": 9.0, "notes": [], "errors": [], "results": results}

    rates = section(
        copy_gb_per_s=[4100.0, 4000.0, 4200.0], matrix_tflop_per_s=[705.0, 700.0, 710.0]
    )
    failed = section() | {"status": "failed", "errors": ["a | b"], "notes": list("12345")}
    return {
        "command": "python -m common.workshop.gpu_report",
        "date": "2027-01-02",
        "is_rehearsal": False,
        "environment": {
            "device": {"name": "NVIDIA H200", "memory_bytes": 140 << 30}, "torch": "2.11",
            "triton": "3.6", "transformers": "5", "python": "3.12", "commit": "0123456789abcdef",
            "is_dirty": False,
        },
        "config": {"seed": 1, "dtype": "bfloat16"},
        "sections": {
            "ceilings": rates,
            "kernels": section(
                checks=[],
                cells=[cell(64, 2048, 1.25), cell(512, 2048, 1.6), cell(512, 8192, 4.0),
                       cell(1, 2048, 10.0), cell(64, 2048, 8.0, "attention v1")],
            ),
            "eager: workload": section(runs=[run(9000), run(11000)]),
            "eager: waits": section(num_steps=10, meant=10, hidden=5, hidden_at={}),
            "eager: decode steps": section(steps=[cell(64, 256, 4.0), cell(1, 256, 50.0)]),
            "overlap: workload": section(runs=[run(30000), run(20000)]),
            "overlap: decode steps": section(steps=[cell(64, 256, 1.25)]),
            "graphs: waits": failed,
            "graphs: workload": section() | {"status": "running"},
        },
    }  # fmt: skip


def test_what_was_not_measured_is_not_estimated() -> None:
    record = a_record()
    for name in ("kernels", "eager: decode steps", "overlap: decode steps"):
        record["sections"][name] = record["sections"][name] | {"results": {}}
    record["environment"]["device"]["name"] = "NVIDIA A10"  # the third aim is an H200's
    assert [found for _, _, found in aims_of(record)] == [None] * 3
    assert render(record).count("not measured") == 3 + 2  # and graphs, and transformers


def test_the_report_says_what_the_record_holds() -> None:
    """Aims are held against the worst of what they speak of: 1 / 1.6 of the bandwidth at batch 512;
    the best mode's step and run."""
    text = render(a_record())
    assert "a copy moves 4,100 GB/s (4000-4200)" in text and "705 TFLOP/s" in text
    assert "75% | 62% | missed |" in text and "70% | 80% | reached |" in text
    assert "25,000 | 30,000 | reached |" in text
    assert "| eager | 10,000 | 9,000-11,000 (2) | 1,100 | 1.00 | 0.50 |" in text
    assert "| overlap | 25,000 | 20,000-30,000 (2) | 1,100 |  |  |" in text
    assert "| 64 x 256 | 1.00 ms |  | 4.00 ms, 25% |  | 1.25 ms, 80% |" in text
    assert "| 512 | 62% | 25% |" in text and "| 1 | 10% |  |" in text
    assert "* graphs: waits: a / b" in text and "and 2 more of the kind" in text
    assert "* graphs: workload: it never ended" in text
    assert "commit 0123456789; 2027-01-02; 81 s." in text
    for table in text.split("\n\n"):
        assert len({line.count("|") for line in table.splitlines() if line[:1] == "|"}) <= 1
