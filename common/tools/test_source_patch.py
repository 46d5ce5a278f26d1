from __future__ import annotations

import pytest

from common.tools.source_patch import Patch, names_in

POOL = "02_paged_kv/block_pool.py"
LINE = "        return len(self._free)\n"


def test_old_lines_are_replaced_and_nothing_else() -> None:
    patch = Patch(POOL, LINE, "        return 0\n")
    assert patch.apply() == patch.text().replace(LINE, "        return 0\n") != patch.text()


@pytest.mark.parametrize(("old", "num"), [("nowhere to be found", 0), ("block_id", None)])
def test_what_does_not_stand_there_once_is_refused(old: str, num: int | None) -> None:
    with pytest.raises(ValueError, match=f"has '{old}' {'' if num is None else num}"):
        Patch(POOL, old, "").apply()


def test_a_diff_has_whole_lines_and_keeps_their_distance() -> None:
    old = "len(self._free)\n\n    def allocate"
    patch = Patch(POOL, old, "0 if self._free else (\n            1\n        )\n\n    def allocate")
    expected = "- return len(self._free)\n+ return 0 if self._free else (\n+     1\n+ )"
    assert patch.diff() == expected


def test_a_place_is_the_innermost_definition() -> None:
    assert Patch(POOL, LINE, "").place() == "BlockPool.num_free_blocks"
    assert Patch(POOL, "NULL_BLOCK_ID = 0", "").place() == ""


@pytest.mark.parametrize(
    ("file", "module"),
    [
        (POOL, "block_pool"),
        ("02_paged_kv/beyond/kv_budget.py", "kv_budget"),
        ("common/sampling/sampler.py", "common.sampling.sampler"),
    ],
)
def test_a_file_is_imported_by_its_flat_name_or_in_its_package(file: str, module: str) -> None:
    assert Patch(file, "", "").module == module


def test_names_are_those_of_the_top_level() -> None:
    assert names_in(POOL) == {"Block", "BlockPool"}
