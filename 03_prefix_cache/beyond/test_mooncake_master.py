"""Error messages on a machine without the store. For masters that start, see
`test_mooncake_pool.py`."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from pathlib import Path

import pytest

import mooncake_master
from mooncake_master import MooncakeMaster, MooncakeUnavailableError


def test_the_pool_can_be_imported_without_the_store() -> None:
    folder = Path(mooncake_master.__file__).parent
    script = (
        f"import sys; sys.path.insert(0, {str(folder)!r}); sys.modules['mooncake'] = None\n"
        "import mooncake_pool\n"
        "mooncake_pool.MooncakeAddress('a:1', 'a:2')\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_program_that_is_not_installed_is_reported_with_the_package_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_loader("mooncake", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]  # an unrelated package of that name
    for found in (None, spec):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, found=found: found)
        with pytest.raises(MooncakeUnavailableError, match="pip install"):
            MooncakeMaster()


def test_a_program_that_does_not_start_is_reported_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "mooncake_master"
    program.write_text("#!/bin/sh\necho libibverbs.so.1 is missing >&2\nexit 127\n")
    program.chmod(0o755)
    spec = importlib.util.spec_from_loader("mooncake", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    start = time.monotonic()
    with pytest.raises(MooncakeUnavailableError, match=r"(?s)apt-get install.*so.1 is missing"):
        MooncakeMaster()
    assert time.monotonic() - start < 20, "a program that has ended was waited for"
