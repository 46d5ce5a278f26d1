"""The whole report, rehearsed: every line that a GPU will meet has run here."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from common.engine_config import EngineConfig
from common.workshop.bench import gpu_command, gpu_sections
from common.workshop.bench.bench_record import ROOT, read_record, write_record
from common.workshop.bench.gpu_budget import Planned
from common.workshop.bench.gpu_command import RECORDS, main, parse, record_path, version_of
from common.workshop.bench.gpu_device import RehearsedDevice
from common.workshop.bench.gpu_inputs import (
    FULL,
    REHEARSAL,
    TINY_MODEL,
    Cell,
    Lab,
    make_caches,
    num_blocks_of,
    paged_inputs,
)
from common.workshop.bench.gpu_table import NOTHING, aims_of, readme_text, render
from paged_attention import paged_attention

SAMPLE = ["ceilings", "overlap: workload", "transformers", "ceilings again"]
SAMPLED = f"""
from common.workshop.bench import gpu_command, gpu_sections

every = gpu_sections.plan_sections
gpu_sections.plan_sections = lambda lab: {{name: every(lab)[name] for name in {SAMPLE}}}
raise SystemExit(gpu_command.main())
"""


def rehearse(folder: Path, *program: str, **environment: str) -> tuple[dict, str]:
    """The record of `--rehearse`, and what it printed."""
    path = folder / "record.json"
    environment |= {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, *program, "--rehearse", "--budget", "900"]
    done = subprocess.run(
        [*command, "--seed", "1", "--record", str(path)],
        env=environment, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return read_record(path), done.stdout


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory) -> tuple[dict, str]:
    return rehearse(tmp_path_factory.mktemp("report"), "-m", "common.workshop.gpu_report")


@pytest.fixture(scope="module")
def sampled(tmp_path_factory) -> tuple[dict, str]:
    """Some sections only; the interpreter is chosen before they are imported."""
    return rehearse(tmp_path_factory.mktemp("sample"), "-c", SAMPLED, TRITON_INTERPRET="1")


def test_a_rehearsal_of_some_sections_runs_to_its_end(sampled) -> None:
    record, printed = sampled
    assert list(record["sections"]) == SAMPLE
    for name, section in record["sections"].items():
        assert section["status"] == "done" and section["errors"] == [], (name, section)
    (served,) = record["sections"]["overlap: workload"]["results"]["runs"]
    (run,) = record["sections"]["transformers"]["results"]["runs"]
    assert served["is_complete"] and run["is_complete"]
    assert run["output_tokens"] == served["output_tokens"] > 0
    assert record["is_rehearsal"] and "A rehearsal on a CPU: these numbers say nothing" in printed
    assert len(record["environment"]["commit"]) == 40 and record["config"]["seed"] == 1


@pytest.mark.slow
def test_a_rehearsal_runs_every_section_to_its_end(rehearsed) -> None:
    record, _ = rehearsed
    lab = Lab(RehearsedDevice(), REHEARSAL, 0)
    sections = record["sections"]
    assert list(sections) == list(gpu_sections.plan_sections(lab))
    for name, section in sections.items():
        assert section["status"] == "done", (name, section)
        assert section["errors"] == []


@pytest.mark.slow
def test_every_kernel_was_compared_and_timed(rehearsed) -> None:
    sections = rehearsed[0]["sections"]
    checks, results = sections["numbers"]["results"]["checks"], sections["kernels"]["results"]
    assert all(check["is_right"] for check in checks + results["checks"])
    kernels = {row["kernel"] for row in results["cells"]}
    families = {kernel.partition(":")[0] for kernel in kernels}
    assert families - {"merging of splits"} == {check["kernel"] for check in checks}
    for name in ("attention v1", "attention v2", "attention v3", "add_rms_norm"):
        assert {c["dtype"] for c in checks if c["kernel"] == name} == {
            "float32", "bfloat16", "float16",
        }  # fmt: skip
    for row in results["cells"]:
        assert len(row["ms"]) == REHEARSAL.repeats and min(row["ms"]) > 0
        assert row["bytes"] > 0 and row["floor_ms"] > 0


def test_no_kernel_of_the_book_is_forgotten() -> None:
    """Every function that Triton compiles and that is launched is covered by a group."""
    from common.workshop.bench.gpu_kernels import GROUPS

    written = set()
    for path in [*ROOT.glob("[0-9]*/**/*.py"), *ROOT.glob("common/kernels/*.py")]:
        text = path.read_text(encoding="utf-8")
        written |= set(
            re.findall(
                r"^@jit\w*(?:\([^()]*(?:\([^()]*\)[^()]*)*\))?\ndef (\w+_kernel)\(",
                text,
                re.MULTILINE,
            )
        )
    assert {"_split_attention_kernel", "_silu_and_multiply_kernel"} <= written
    assert written == {name for group in GROUPS for name in group.covers}


@pytest.mark.slow
def test_the_engine_served_and_waited_once_a_step_in_every_mode(rehearsed) -> None:
    sections = rehearsed[0]["sections"]
    for mode in ("eager", "overlap", "graphs"):
        runs = sections[f"{mode}: workload"]["results"]["runs"]
        assert runs and all(run["is_complete"] and run["output_tokens"] > 0 for run in runs)
        served_by = sections[f"{mode}: workload"]["results"]["engine"]
        assert served_by["has_graphs"] is (mode != "eager")
        waits = sections[f"{mode}: waits"]["results"]
        assert waits["meant"] == waits["num_steps"] > 0 and waits["hidden"] == 0
        steps = sections[f"{mode}: decode steps"]
        assert [row["cell"] for row in steps["results"]["steps"]] == [[2, 20]]
        assert "do not fit: 1048576 x 20" in steps["notes"][0]
    assert [r["cell"] for r in sections["the model alone"]["results"]["steps"]] == [[2, 20]]
    (run,) = sections["transformers"]["results"]["runs"]
    assert run["is_complete"]
    served = sections["eager: workload"]["results"]["runs"][0]
    assert run["output_tokens"] == served["output_tokens"]


def test_the_sizes_of_a_gpu_are_those_of_the_aims() -> None:
    assert {64, 512, 1} <= {n for n, _ in FULL.decode_cells}
    assert {256, 8192} <= {context for _, context in FULL.decode_cells}
    assert FULL.decode_cells[0] == FULL.forward_cells[0] == (64, 2048)  # the aims come first
    assert FULL.workload == (256, (100, 1024), (100, 1024))
    assert max(n for _, n in FULL.decode_cells) < FULL.max_model_len - FULL.num_decode_steps
    plan = gpu_sections.plan_sections(Lab(RehearsedDevice(), FULL, 0))
    assert sum(section.share for section in plan.values()) == pytest.approx(1, abs=0.15)
    assert gpu_command.BUDGET_S + gpu_command.PATIENCE_S < 8 * 60


# -- inputs and judgement


def test_attention_by_the_definition_is_chapter_2s_in_float64() -> None:
    lengths = [(1, 1), (1, 33), (5, 5), (7, 40)]
    lab = Lab(RehearsedDevice(), REHEARSAL, 3)
    caches = make_caches(lab, num_blocks_of(lengths) + 3, torch.float64)
    inputs = paged_inputs(lab, lengths, caches, poisoned=True)
    assert caches[0].isnan().any() and len(set(inputs.tables[3, :3].tolist())) == 3
    expected = paged_attention(inputs.query, *caches, inputs.metadata(), inputs.scale)
    found = torch.cat([inputs.in_float64(row) for row in range(len(lengths))])
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


def test_what_is_wrong_is_judged_wrong() -> None:
    from common.workshop.bench.gpu_work import Comparison

    torch.manual_seed(0)
    expected = torch.randn(200, 8, dtype=torch.float64)
    right = expected.float()

    def judge(found: torch.Tensor, wanted: torch.Tensor = expected, dtype=torch.float32) -> dict:
        return Comparison("k", dtype, "w", found, wanted).judge()

    assert judge(right)["is_right"] and judge(right)["error"] < 1e-7
    for change in (
        lambda x: x.__setitem__((3, 2), math.nan),
        lambda x: x.__setitem__((3, 2), math.inf),
        lambda x: x[7].zero_(),
        lambda x: x[3, 2].add_(2e-4),  # one number: too little for the norm
        lambda x: x.mul_(1 + 3e-5),
    ):
        wrong = right.clone()
        change(wrong)
        row = judge(wrong)
        assert not row["is_right"], row
        assert row["error"] is None or row["error"] > 1e-6
    assert not judge(right[:-1])["is_right"] and not judge(expected)["is_right"]
    coarse = expected.bfloat16()
    assert judge(coarse, dtype=torch.bfloat16)["is_right"] and not judge(coarse.float())["is_right"]
    tokens = torch.arange(5)
    assert judge(tokens, tokens, torch.int64)["is_right"]
    assert judge(tokens + (tokens == 3), tokens, torch.int64)["error"] == 1


# -- decode steps


def test_prompts_are_taken_in_without_being_computed() -> None:
    """Every timed step computes one token for each sequence, at the promised number of keys; and
    until then nobody touched keys and values."""
    from common.engine import LLMEngine
    from common.workshop.bench import gpu_decode
    from common.workshop.bench.random_weights import random_model

    for overlaps in (False, True):
        config = EngineConfig(
            device="cpu", attention_backend="torch", num_blocks=65, max_num_seqs=4,
            max_num_batched_tokens=16, max_model_len=64, overlap_scheduling=overlaps,
        )  # fmt: skip
        engine = LLMEngine(config, loaded=random_model(TINY_MODEL))
        lab = Lab(RehearsedDevice(), REHEARSAL, 0)
        keys = engine.kv_cache.key_cache[0]
        keys.normal_()
        seen, untouched = [], keys.clone()
        runner = gpu_decode.paged_runner(engine)
        forward = runner.forward

        def spy(batch, forward=forward, seen=seen, keys=keys, untouched=untouched):
            if not seen:
                assert torch.equal(keys, untouched)
            seen.append((batch.positions.tolist(), batch.attention[0].seq_lens.tolist()))
            return forward(batch)

        runner.forward = spy
        times = gpu_decode.time_decode(engine, lab, Cell(3, 20), num_steps=4)
        assert len(times) == 4 and not engine.has_unfinished_requests()
        num_warm = gpu_decode.NUM_WARM_STEPS
        expected = [([19 + i] * 3, [20 + i] * 3) for i in range(num_warm + 4)]
        assert seen[: len(expected)] == expected
        engine.check_invariants()
        engine.close()


def test_a_dropped_engine_gives_its_memory_back() -> None:
    """The first engine of a process freezes itself, cycles and all: on a GPU the next one would
    find no memory."""
    import weakref

    from common.engine import LLMEngine
    from common.workshop.bench.gpu_engine import Engines
    from common.workshop.bench.random_weights import random_model

    engines = Engines(Lab(RehearsedDevice(), REHEARSAL, 0))
    config = EngineConfig(device="cpu", attention_backend="torch", num_blocks=9, max_model_len=64)
    engines._engine = LLMEngine(config, loaded=random_model(TINY_MODEL))
    engines.made = ("eager", 64)
    cache = weakref.ref(engines._engine.kv_cache.key_cache[0])
    engine = weakref.ref(engines._engine)
    engines.drop()
    assert cache() is None and engine() is None and engines.made is None


# -- the command


def test_a_rehearsal_is_never_a_result(sampled, tmp_path) -> None:
    record, _ = sampled
    with pytest.raises(ValueError, match="a rehearsal is no result"):
        readme_text([record])
    args = parse(["--rehearse", "--record", str(RECORDS / "gpu_report_x.json")])
    with pytest.raises(ValueError, match="among the results"):
        record_path(args, "x")
    assert record_path(parse(["--rehearse"]), "x").parent == ROOT / "build"
    path, page = tmp_path / "record.json", tmp_path / "README.md"
    write_record(path, record)
    page.write_text("<!-- table:gpu -->\nas it was\n<!-- /table:gpu -->\n")
    assert main(["--write-readme", "--record", str(path), "--page", str(page)]) == 1
    assert "as it was" in page.read_text()


def test_the_text_shows_the_records_that_are_there() -> None:
    records = [read_record(path) for path in sorted(RECORDS.glob("gpu_report_*.json"))]
    page = (ROOT / "common" / "workshop" / "bench" / "README.md").read_text(encoding="utf-8")
    shown = page.partition("<!-- table:gpu -->\n")[2].partition("\n<!-- /table:gpu -->")[0]
    assert shown == readme_text(records)
    assert records or shown == NOTHING


def test_a_record_of_uncommitted_code_is_not_written_into_the_text(sampled) -> None:
    record = sampled[0] | {"is_rehearsal": False}
    clean = record["environment"] | {"is_dirty": False}
    assert "say nothing" not in readme_text([record | {"environment": clean}])
    for change in ({"is_dirty": True}, {"commit": None}):
        with pytest.raises(ValueError, match="commit, and measure again"):
            readme_text([record | {"environment": clean | change}])


def test_records_are_named_by_the_gpu_and_versions_compared_as_numbers() -> None:
    assert record_path(parse([]), "NVIDIA H200").name == "gpu_report_nvidia-h200.json"
    assert version_of("2.13.0+cpu") == (2, 13) > version_of("2.9.1")


def test_a_lost_device_is_followed_by_another_process(tmp_path, monkeypatch, capsys) -> None:
    """It gets the record, measures what is missing, and its exit status counts."""

    class Lost(RehearsedDevice):
        def is_usable(self) -> bool:
            return False

    def fail(section) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    ran: list[str] = []
    plan = {
        "ceilings": Planned(1, lambda s: ran.append("a")),
        "kernels": Planned(1, fail),
        "workload": Planned(1, lambda s: ran.append("c")),
    }
    monkeypatch.setattr(gpu_sections, "plan_sections", lambda lab: plan)
    monkeypatch.setattr(gpu_command, "choose_interpreter", lambda is_rehearsal: None)
    monkeypatch.setattr(gpu_command, "make_device", lambda is_rehearsal: Lost())
    path, again = tmp_path / "record.json", []
    first = ["--rehearse", "--record", str(path), "--seed", "5"]
    assert main(first, restart=lambda argv: again.append(list(argv)) or 7) == 7
    assert again == [[*first, "--resume"]] and ran == ["a"]
    monkeypatch.setattr(gpu_command, "make_device", lambda is_rehearsal: RehearsedDevice())
    assert main(again[0], restart=pytest.fail) == 1  # a section has failed
    assert ran == ["a", "c"]
    record = read_record(path)
    assert [s["status"] for s in record["sections"].values()] == ["done", "failed", "done"]
    assert record["num_restarts"] == 1 and record["config"]["seed"] == 5
    assert "illegal memory access" in capsys.readouterr().out


def test_what_is_asked_wrongly_is_said(monkeypatch, capsys) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert main([]) == 1
    assert "TRITON_INTERPRET is set" in capsys.readouterr().err
    for argv in (["--budget", "0"], ["--resume"]):
        with pytest.raises(SystemExit):
            parse(argv)
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setitem(sys.modules, "triton", object())
    assert main(["--rehearse"]) == 1
    assert "Triton is imported already" in capsys.readouterr().err


# -- the tables


def a_record() -> dict:
    def cell(n: int, context: int, ms: float, kernel: str = "attention v3") -> dict:
        cost = {"bytes": 1, "flops": 1, "floor_ms": 1.0, "is_bound_by_memory": True}
        where = {"cell": [n, context], "what": f"{n} x {context:,}"}
        return {"group": "decode attention", "kernel": kernel, "ms": [ms, ms, 9.0], **where, **cost}

    def run(speed: float, is_complete: bool = True) -> dict:
        return {"output_tokens_per_s": speed, "is_complete": is_complete, "num_steps": 1100}

    def section(**results: object) -> dict:
        return {"status": "done", "seconds": 9.0, "notes": [], "errors": [], "results": results}

    rates = section(copy_gb_per_s=[4000.0, 4100.0, 4200.0], matrix_tflop_per_s=[700.0, 710.0])
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
            "overlap: workload": section(runs=[run(30000), run(99000, is_complete=False)]),
            "overlap: decode steps": section(steps=[cell(64, 256, 1.25)]),
            "graphs: waits": failed,
        },
    }  # fmt: skip


def test_aims_are_held_against_the_worst_of_what_they_speak_of() -> None:
    """1 / 1.6 of the bandwidth at batch 512; the best mode's step; complete runs only."""
    attention, step, speed = aims_of(a_record())
    assert attention["found"] == pytest.approx(0.625) and attention["is_reached"] is False
    assert step["found"] == pytest.approx(0.8) and step["is_reached"] is True
    assert speed["found"] == 30000 and speed["is_reached"] is True


def test_what_was_not_measured_is_not_estimated() -> None:
    record = a_record()
    for name in ("kernels", "eager: decode steps", "overlap: decode steps"):
        record["sections"][name] = record["sections"][name] | {"results": {}}
    record["environment"]["device"]["name"] = "NVIDIA A10"  # the third aim is an H200's
    assert [one["found"] for one in aims_of(record)] == [None] * 3
    assert render(record).count("not measured") == 3 + 2  # and graphs, and transformers


def test_the_report_says_what_the_record_holds() -> None:
    text = render(a_record())
    assert "a copy moves 4,100 GB/s (4000-4200)" in text and "705 TFLOP/s" in text
    assert "75% | 62% | missed |" in text and "70% | 80% | reached |" in text
    assert "| eager | 10,000 | 9,000-11,000 (2) | 1,100 | 1.00 | 0.50 |" in text
    assert "| overlap | 64,500, ended early | 30,000-99,000 (2) | 1,100 |  |  |" in text
    assert "| 64 x 256 | 1.00 ms |  | 4.00 ms, 25% |  | 1.25 ms, 80% |" in text
    assert "| 512 | 62% | 25% |" in text and "| 1 | 10% |  |" in text
    assert "* graphs: waits: a / b" in text and "and 2 more of the kind" in text
    assert "commit 0123456789; 2027-01-02; 72 s." in text
    for table in text.split("\n\n"):
        assert len({line.count("|") for line in table.splitlines() if line[:1] == "|"}) <= 1


def test_a_run_that_ended_early_is_not_hidden() -> None:
    record = a_record()
    record["sections"]["eager: workload"]["status"] = "running"
    assert "* eager: workload: it never ended" in render(record)
