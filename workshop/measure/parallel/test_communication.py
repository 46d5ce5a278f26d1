"""The tables of README.md, and the command that measures."""

from __future__ import annotations

import pytest

from common.parallel.ranks import Ranks
from common.parallel.sharded_model import rank_config
from workshop.measure.bench.bench_record import read_record, replace_between_markers
from workshop.measure.parallel import measure_communication
from workshop.measure.parallel.communication import QWEN3_32B, README, row, table, weight_bytes


def test_readme_has_the_table_of_today():
    text = README.read_text(encoding="utf-8")
    assert replace_between_markers(text, "communication", table()) == text
    if measure_communication.RECORD.exists():
        measured = measure_communication.table(read_record(measure_communication.RECORD))
        assert replace_between_markers(text, "exchange", measured) == text


def test_the_sums_of_the_32b_shape_by_hand():
    """64 layers of 5120 x (64 + 2 x 8 heads of 128) + (64 x 128) x 5120 + 3 x 5120 x 25600."""
    layer = 5120 * 80 * 128 + 64 * 128 * 5120 + 3 * 5120 * 25600 + 2 * 5120 + 72 * 128
    assert weight_bytes(QWEN3_32B) == 2 * (64 * layer + 5120 + 151936 * 5120)
    cells = row("32B", QWEN3_32B, 2)
    assert cells["all-reduces, gathers"] == "129, 1"
    handed_over = 129 * 32 * 5120 * 2 + 32 * (151936 // 2) * 2
    assert cells["handed over, MB"] == f"{handed_over / 1e6:.1f}"
    halved = weight_bytes(rank_config(QWEN3_32B, Ranks(2)))
    assert 0.5 <= halved / weight_bytes(QWEN3_32B) < 0.501, "norms are not divided"


@pytest.mark.slow
def test_an_exchange_is_measured(tmp_path, capsys):
    record = tmp_path / "record.json"
    options = ["--repeats", "2", "--mebibytes", "1", "--record", str(record)]
    measure_communication.main(options)
    assert all(len(times) == 2 for times in read_record(record)["us"].values())
    assert capsys.readouterr().out.count("| Qwen3") == 2
