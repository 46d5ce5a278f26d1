"""Tables say what records hold, and the texts show the tables."""

from __future__ import annotations

import re
import statistics

import pytest

from workshop.measure.bench import bench, bench_table, ladder_bench, ladder_table
from workshop.measure.bench.bench_command import Driver, places_of
from workshop.measure.bench.bench_record import ROOT, read_record, replace_between_markers
from workshop.practice.museum.hall import EXHIBITS
from workshop.practice.tasks.course import TASKS


def a_record() -> dict:
    def run(speed: float, steps: int, **more: object) -> dict:
        return {"useful_tokens_per_s": speed, "num_steps": steps, **more}

    def latency(p50: float, p99: float) -> dict:
        return {"ttft_ms": {"p50": p50, "p99": p99}, "inter_token_ms": {"p50": 4, "p99": 55}}

    decode = {"num_rows": 2, "num_steps": 9, "step_ms": 30.0, "kv_tokens": 500}
    return {
        "command": "python -m workshop.bench",
        "date": "2026-01-02",
        "environment": {
            "cpu": "Abacus", "cpu_capability": "AVX2", "memory_bytes": 24 << 30, "torch": "2",
            "transformers": "5", "python": "3.11", "commit": "0123456789ab", "is_dirty": True,
        },
        "config": {
            "model": "tiny", "num_parameters": 5_800_000, "dtype": "float32", "threads": 2,
            "malloc": {"mode": "tuned"}, "repeats": 4,
            "workload": {
                "num_requests": 2, "prompt_lens": [3, 4], "output_lens": [5, 6],
                "output_tokens": [5, 6],
            },
        },
        "systems": {
            "one-at-a-time": {"title": "alone", "num_requests": 1, "error": None,
                              "runs": [run(7.04, 11, **latency(900, 1500))]},
            "static": {"title": "static", "num_requests": 2, "error": None,
                       "runs": [run(30, 6, slot_utilisation=0.5), run(10, 6, slot_utilisation=0.5),
                                run(20, 6, slot_utilisation=0.5)]},
            "paged": {"title": "paged", "num_requests": 2, "error": None,
                      "runs": [run(120, 6, **latency(8, 12), decode=decode)]},
            "padded": {"title": "padded", "num_requests": 2, "error": None, "runs": []},
            "transformers-continuous": {"title": "hf", "num_requests": 2, "runs": [],
                                        "error": "no manager"},
        },
        "roofline": {
            "bandwidth": {"copy_gb_per_s": [9, 10, 11], "matvec_gb_per_s": [20, 20, 1]},
            "weight_bytes": 200_000_000,
            "linear_ms": {"1": [10.0], "2": [15.0, 15.0]},
            "kv_bytes_per_token": 80_000,
        },
        "gather": {
            "num_seqs": 32, "seq_len": 256, "num_kv_heads": 8, "head_dim": 128,
            "ms": {"bfloat16": {
                "blocks, into a buffer": [1.0], "blocks": [2.0], "tokens": [7.0, 3.0, 5.0],
                "attention, paged": [11.0], "attention, contiguous": [12.0],
            }},
        },
    }  # fmt: skip


def test_a_table_shows_what_the_record_holds() -> None:
    lines = bench_table.render(a_record()).splitlines()
    rows = {line.split("|")[1].strip(): line for line in lines if line.startswith("| ")}
    assert rows["alone, first 1 of 2 requests"] == (
        "| alone, first 1 of 2 requests | 7.0 | 1 run | 900 ms / 1.5 s | 4 ms / 55 ms | 11 |  |"
    )
    assert rows["static"] == "| static | 20.0 | 10.0-30.0 (3 runs) |  |  | 6 | 50% |"
    assert rows["paged"].startswith("| paged | 120 | 1 run | 8 ms / 12 ms |")
    whole = bench_table.render({**a_record(), "config": {**a_record()["config"], "repeats": 3}})
    assert "| static | 20.0 | 10.0-30.0 |" in whole, "as many runs as were asked for"
    assert rows["padded"] == "| padded | not measured: the time budget was used up | | | | | |"
    assert rows["hf"] == "| hf | no manager | | | | | |"
    text = "\n".join(lines)
    assert "2 requests at once, 3-4 tokens in, 5-6 out, 11 useful tokens" in text
    assert "200 MB of weights at 20.0 GB/s" in text and "take 10 ms" in text
    assert "with 2 requests: 30 ms, 3.00 times that floor and 2.00 times its matrices" in text
    assert "reading its KV once takes 2 ms more" in text
    assert "by token 5; attention 11 through the table, 12 to contiguous KV" in text
    assert "commit 012345678* with uncommitted changes" in text
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1


def test_a_table_replaces_what_stands_between_its_markers_and_nothing_else() -> None:
    text = "a\n<!-- table:bench -->\nold\n<!-- /table:bench -->\nb <!-- /table:other -->\n"
    once = replace_between_markers(text, "bench", "| new |")
    assert once == text.replace("old", "| new |")
    assert replace_between_markers(once, "bench", "| new |") == once
    for broken in ("", text + text, text.replace("<!-- /table:bench -->", "")):
        with pytest.raises(ValueError, match="markers"):
            replace_between_markers(broken, "bench", "x")


def test_the_short_table_has_a_column_for_each_record() -> None:
    small, large = a_record(), a_record()
    large["config"] |= {"model": "large", "num_parameters": 600_000_000, "dtype": "bfloat16"}
    large["environment"] |= {"cpu_capability": "AVX512"}
    del large["systems"]["static"]
    large["systems"]["paged"]["runs"] += [{"useful_tokens_per_s": 140.0}]
    assert bench_table.render_short([small, large]).splitlines() == [
        "| useful tok/s | tiny, 5.8 M parameters, float32 on AVX2 | "
        "large, 600.0 M parameters, bfloat16 on AVX512 |",
        "| --- | ---: | ---: |",
        "| alone | 7.0 (first 1 of 2 requests) | 7.0 (first 1 of 2 requests) |",
        "| static | 20.0 |  |",
        "| paged | 120 | 130 |",
        "| hf |  |  |",
        "",
        "Over one request at a time the engine gains 17.0 times (tiny, float32 on AVX2), "
        "18.5 times (large, bfloat16 on AVX512).",
    ]


def a_ladder_record() -> dict:
    def run(speed: float, first: float, gap: float) -> dict:
        return {
            "output_tokens_per_s": speed, "ttft_ms_p50": first, "ttft_ms_p99": 2 * first,
            "inter_token_ms_p50": gap / 10, "inter_token_ms_p99": gap, "num_steps": 1200,
        }  # fmt: skip

    runs = [run(100, 9000, 50), run(300, 7000, 70), run(110, 8000, 90)]
    many = {
        "title": "many users", "num_requests": 80, "num_long": 4, "arrivals_per_s": 24.0,
        "rungs": {
            "static": {"title": "static batch", "runs": runs},
            "paged": {
                "title": "2 paged KV",
                "runs": [{**run(400.4, 12, 8), "kv_waste": 0.41, "preemptions": 0}],
            },
        },
    }  # fmt: skip
    few = {**many, "title": "few users", "num_requests": 10, "arrivals_per_s": 1.25}
    return {
        "command": "python -m workshop.ladder",
        "environment": {
            "cpu": "Abacus", "cores": 2, "python": "3.11", "torch": "2.13",
            "commit": "0123456789abcdef", "is_dirty": True, "load_average": 0.2,
        },
        "config": {"seeds": 3},
        "regimes": {"many": many, "few": few},
    }  # fmt: skip


def test_the_ladder_shows_medians_of_both_regimes() -> None:
    lines = ladder_table.render(a_ladder_record()).splitlines()
    assert lines[0].startswith("| many users: 80 requests, 24 a second, 4 long | output tok/s |")
    assert lines[2] == (
        "| static batch | 110 | 100-300 | 8,000 / 16,000 | 7.0 / 70 |  |  |  |  |  | 1,200 |"
    )
    assert lines[3].startswith("| 2 paged KV | 400 | 400-400 | 12 / 24 | 0.8 / 8 | 41% |  | 0")
    assert lines[5].startswith("| few users: 10 requests, 1.25 a second, 4 long |")
    assert "0123456789` with uncommitted changes, on Abacus" in lines[-1]


def test_a_chapters_question_is_shown_without_it_and_with_it() -> None:
    record = a_ladder_record()
    work = {"title": "more users", "num_requests": 40, "num_long": 0, "arrivals_per_s": 24.0}
    question = {**record["regimes"]["many"], **work}
    shown = ladder_table.render({**record, "questions": {"paged": question}}).split("\n\n")[2]
    assert shown.splitlines()[2] == (
        "| 2 paged KV; more users: 40 requests, 24 a second "
        "| 110 → 400 | 8,000 ms → 12 ms | 70 ms → 8 ms |"
    )


def test_the_short_ladder_has_four_columns_of_many_users() -> None:
    lines = ladder_table.render_short(a_ladder_record()).splitlines()
    assert lines[0].count("|") == 6 and "few" not in lines[0]
    assert lines[1] == "| --- | ---: | ---: | ---: | --- |"
    phrase = ladder_table.PHRASES["static"][1]
    assert lines[2] == f"| static batch | 110 | 8,000 ms | 70 ms | {phrase} |"
    assert lines[3].startswith("| [2 paged KV](02_paged_kv/README.md) | 400 | 12 ms | 8 ms | ")
    assert "medians of 3 workloads on Abacus" in lines[-1]
    assert "`0123456789` with uncommitted changes" in lines[-1]


def test_a_gain_is_the_number_that_the_idea_is_for() -> None:
    record = a_ladder_record()
    lines = ladder_table.render_gains(
        {**record, "questions": {"prefix-cache": record["regimes"]["many"]}}
    ).splitlines()
    assert lines[2:] == [
        "| 3 prefix caching | one long system prompt | time to first token 8,000 → 12 ms |",
        "| all six | 80 requests, 24 a second, against one request at a time "
        "| throughput 110 → 400 tok/s, time to first token 8,000 → 12 ms |",
    ]


def test_the_first_screen_has_the_digits_of_the_record_and_of_the_folders() -> None:
    """In words, which no script writes: the loss, the number of tasks and that of bugs."""
    many = read_record(ladder_bench.DRIVER.committed)["regimes"]["many"]["rungs"].values()
    gaps = [[run["inter_token_ms_p99"] for run in config["runs"]] for config in many]
    first, *_, last = (f"{statistics.median(gap):.0f}" for gap in gaps)
    for page in ("README.md", "README.zh.md"):
        screen = (ROOT / page).read_text(encoding="utf-8").partition("<details>")[0]
        (loss,) = (part for part in screen.split("\n\n") if "n-gram" in part)
        assert re.findall(r"\d+", loss.replace("p99", "")) == ["1", "5", first, last]
        assert f" {len(TASKS)} " in screen and f" {len(EXHIBITS)} " in screen


@pytest.mark.parametrize("driver", [bench.DRIVER, ladder_bench.DRIVER], ids=lambda d: d.name)
def test_the_texts_show_the_committed_records(driver: Driver) -> None:
    for place, part, table in places_of(driver.name, driver.tables(driver.committed)):
        text = (ROOT / place).read_text(encoding="utf-8")
        assert replace_between_markers(text, part, table) == text, (
            f"python -m workshop.{driver.name} --write-readme writes {place}"
        )
