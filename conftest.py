"""For every test of the repository: wrong code is reported soon.

Hypothesis draws the same examples in each run, does not shrink what it finds, and looks at no
clock. To draw others, and to see the smallest example that fails:

    pytest 03_prefix_cache -k NAME --hypothesis-profile=shrink
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

try:
    import psutil
    import pytest
    from hypothesis import HealthCheck, Phase, settings
except ModuleNotFoundError as error:
    sys.exit(f"{error}. Run `make demo` once, then `source .venv/bin/activate`")

SLOW_TIMEOUT_S = 3600  # of a test marked slow; the others': `timeout` in pyproject.toml
# `make check`: the rules, the texts, the chapters' roots and the engine's parts. A test that starts
# another process, a compiler, a browser or a rank is skipped when it does so. Of the whole engine
# what is refused, and what is marked: ten rows of the equivalence matrix.
CHECKED = ("[0-9][0-9]_*/test_*.py", "common/test_*.py")
CHECKED += tuple(f"common/{name}/*" for name in ("models", "requests", "sampling", "runner"))
CHECKED += tuple(
    f"common/tests/test_{name}.py" for name in ("house", "texts", "translation", "engine_errors")
)
PARTLY_CHECKED = tuple(
    f"common/tests/test_{name}.py" for name in ("equivalence_matrix", "sampling_fields")
)
# Kernels in the interpreter, ranks, instruction sets and the program are left to `make test`.
UNCHECKED = ("processor", "ranks")
UNCHECKED += ("demo", "llm", "thread_count")
# `make test-book`: what is made of the code, and the machine that makes it. All others are of
# `make test`: the engine, the chapters, the server and the page. Of a file that is not named here,
# `@pytest.mark.book` marks a test.
OF_THE_BOOK = ("workshop/book/*", "workshop/site/*", "workshop/measure/*", "workshop/measure/*/*")
OF_THE_BOOK += ("workshop/practice/*", "workshop/practice/*/*", "workshop/training/*")
OF_THE_BOOK += ("workshop/watch/test_stills.py", "common/tests/test_commands.py")
CHECK = "check"
TEST = "not book and not slow"
TEST_BOOK = "book and not slow"
PROCESSES = ("subprocess.Popen", "os.fork", "os.posix_spawn")  # their names as audit events


# -- optional: `@pytest.mark.needs("browser")`, or `need("browser")` in a fixture or above a file


def has_browser() -> bool:
    from workshop.watch.chromium import PROGRAMS

    return any(map(shutil.which, PROGRAMS)) and find_spec("playwright") is not None


def has_chinese_font() -> bool:
    command = ["fc-list", ":lang=zh", "family"]
    return shutil.which("fc-list") is not None and subprocess.check_output(command).strip() != b""


def has_mooncake() -> bool:
    with suppress(OSError, ImportError):  # of a library that is not installed
        for name in ("libibverbs.so.1", "libnuma.so.1", "libcurl.so.4"):
            ctypes.CDLL(name)
        import mooncake.store  # noqa: F401  # as the Makefile asks

        return True
    return False


class Optional(NamedTuple):
    is_found: Callable[[], bool]
    advice: str
    is_for_all: bool = True  # some have no build for this system


HAS_X86_LINUX = sys.platform == "linux" and platform.machine() == "x86_64"
OPTIONAL = {
    "browser": Optional(has_browser, "apt-get install chromium; pip install playwright"),
    "Chinese font": Optional(has_chinese_font, "apt-get install fontconfig fonts-noto-cjk"),
    "C++ compiler": Optional(
        lambda: any(map(shutil.which, ("g++", "clang++"))), "apt-get install g++"
    ),
    "Mooncake": Optional(
        has_mooncake,
        "Linux on x86-64, Python before 3.14: apt-get install libibverbs1 libnuma1 libcurl4; "
        "pip install -e '.[mooncake]'",
        is_for_all=HAS_X86_LINUX and sys.version_info < (3, 14),
    ),
    "make": Optional(lambda: shutil.which("make") is not None, "apt-get install make"),
    "git": Optional(lambda: shutil.which("git") is not None, "apt-get install git"),
    "vllm-router": Optional(
        lambda: bool(os.environ.get("VLLM_ROUTER") or shutil.which("vllm-router")),
        "pip install vllm-router, or VLLM_ROUTER=FILE",
        is_for_all=False,
    ),
    "triton": Optional(
        lambda: find_spec("triton") is not None, "Linux: make demo", sys.platform == "linux"
    ),
}
for package in ("fastapi", "jsonschema", "openai", "peft", "schemathesis", "scipy", "xgrammar"):
    OPTIONAL[package] = Optional(partial(find_spec, package), "pip install -e '.[test]'")
IS_REQUIRED = bool(os.environ.get("VLLM_FS_REQUIRE_ALL"))  # .ci/run: none of these is skipped
MISSING = "not found: "


@cache
def is_found(name: str) -> bool:
    return bool(OPTIONAL[name].is_found())


def need(name: str) -> None:
    """Skip the test where this is not found, by its name; fail where all of them are required."""
    if is_found(name):
        return
    reason = f"{MISSING}{name} ({OPTIONAL[name].advice})"
    if IS_REQUIRED and OPTIONAL[name].is_for_all:
        pytest.fail(reason)
    pytest.skip(reason, allow_module_level=True)


@pytest.hookimpl(tryfirst=True)  # before fixtures
def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        for name in mark.args:
            need(name)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(call: pytest.CallInfo) -> None:
    """Skip a test that fails because an optional package, or git, is missing."""
    error = call.excinfo.value if call.excinfo else None
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    missing = error.filename if isinstance(error, FileNotFoundError) else missing
    if missing in OPTIONAL:
        try:
            need(missing)
        except (pytest.skip.Exception, pytest.fail.Exception) as outcome:
            call.excinfo = pytest.ExceptionInfo.from_exception(outcome)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, Any, pytest.CollectReport]:
    """Skip a test file that cannot be imported because an optional package is missing."""
    report = yield
    error = report.call.excinfo.value.__cause__ if report.failed else None
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    is_needed = IS_REQUIRED and name in OPTIONAL and OPTIONAL[name].is_for_all
    if name in OPTIONAL and not is_found(name) and not is_needed:
        report.outcome = "skipped"
        report.longrepr = report.nodeid, 0, f"{MISSING}{name} ({OPTIONAL[name].advice})"
    return report


os.environ["LANGUAGE"] = "en"  # else tasks are told in what the terminal speaks
# The settings of `make test ARGS=...` are not those of the makes that tests start.
for variable in ("MAKEFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "ARGS", "PYTHON", "PINS", "JOBS"):
    os.environ.pop(variable, None)
# OpenMP's threads sleep while they have no work, instead of taking time from the other tests.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# `jsonschema` would compile its grammars of addresses, for seconds; no test here uses them.
sys.modules["rfc3987_syntax"] = None

next_collection = 1 << 30  # bytes of resident memory after a test

no_clock = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("shrink", print_blob=True, **no_clock)
settings.register_profile(
    "quick", print_blob=True, derandomize=True, phases=[Phase.explicit, Phase.generate], **no_clock
)
settings.load_profile("quick")


def pytest_configure(config: pytest.Config) -> None:
    """`make test ARGS=FOLDER` runs the folder, also what of it `make test-book` would."""
    is_asked_for = config.args_source == pytest.Config.ArgsSource.ARGS
    if config.option.markexpr in (TEST, TEST_BOOK) and is_asked_for:
        config.option.markexpr = "not slow"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Python's collector would go through all modules and tests again and again, for nothing."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)
        gc.set_threshold(10_000, 50)  # as common/requests/gc_utils.py
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before cases are deselected for their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    keep_samples(items)
    for item in items:
        has_params = "device" in getattr(getattr(item, "callspec", None), "params", ())
        if has_gpu() and "device" in getattr(item, "fixturenames", ()) and not has_params:
            item.add_marker(pytest.mark.gpu)  # of a kernel: compiled, and run on the device
        elif not has_gpu() and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if is_of_the_book(item.path):
            item.add_marker(pytest.mark.book)
        if is_checked(item.path) and not item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.check)
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT_S))


def has_gpu() -> bool:
    """Tests that have not loaded PyTorch do not need to know."""
    return "torch" in sys.modules and sys.modules["torch"].cuda.is_available()


@pytest.fixture(scope="session", autouse=True)
def engines_without_a_device() -> Iterator[None]:
    """Beside a GPU, too, the engines of tests that name no device run on the CPU."""
    if not has_gpu():
        yield
        return
    from common.tests.kernel_device import beside_a_gpu

    with beside_a_gpu():
        yield


@cache  # asked for each case of a file
def is_checked(path: Path) -> bool:
    is_left = path.stem.removeprefix("test_") in UNCHECKED
    return any(path.match(each) for each in CHECKED) and not is_left


@cache
def is_of_the_book(path: Path) -> bool:
    return any(path.match(each) for each in OF_THE_BOOK)


def pytest_runtest_logfinish() -> None:
    """Closed engines stay in cycles, and the C library keeps freed memory: after an hour a process
    of tests would hold gigabytes. Collecting takes tenths of a second, so not after each test."""
    global next_collection
    memory = psutil.Process().memory_info
    if memory().rss < next_collection:
        return
    gc.collect()
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):  # glibc
        libc.malloc_trim(0)
    next_collection = max(next_collection, memory().rss + (200 << 20))


# -- a failure at once; at the end, what was not found


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Print the name of a failed test immediately."""
    if not report.failed:
        return None
    status = "failed" if report.when == "call" else "error"
    return status, f"\n{status}: {report.nodeid}\n", status.upper()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    errors = terminalreporter.stats.get("error", [])
    if any("ModuleNotFoundError" in error.longreprtext for error in errors):
        terminalreporter.write_line("a package is missing: `make test ARGS=PATH` installs it")
    skips = [report.longrepr for report in terminalreporter.stats.get("skipped", [])]
    found = [re.search(f"{MISSING}(.*)", skip[2]) for skip in skips if isinstance(skip, tuple)]
    if missing := sorted({match[1] for match in found if match}):
        terminalreporter.write_line(f"not tried: {'; '.join(missing)}")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """To collect what is left out would take longer than some of the tests."""
    if not collection_path.match("test_*.py"):
        return None
    return True if is_left_out(collection_path, config.option.markexpr) else None


def is_left_out(path: Path, markexpr: str) -> bool:
    """Whether no test of the file is asked for."""
    if markexpr == CHECK:
        return not is_checked(path) and not any(map(path.match, PARTLY_CHECKED))
    if markexpr == TEST:
        return is_of_the_book(path)
    if markexpr == TEST_BOOK:
        return not is_of_the_book(path) and b"pytest.mark.book" not in path.read_bytes()
    return False


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.option.markexpr == CHECK:
        sys.addaudithook(skip_who_starts_a_process)


def skip_who_starts_a_process(event: str, _: tuple[object, ...]) -> None:
    if event in PROCESSES:
        pytest.skip("it starts another process, so it is left to `make test`")


def keep_samples(items: list[pytest.Item]) -> None:
    """Keep the fewest cases of a test marked `sample` in which each value of each parameter occurs;
    the others are slow. `sample(seed=2)` keeps two values of `seed`, and `sample(every=3, first=1)`
    the second, fifth, ... of a list of cases."""
    grids: dict[str, list[pytest.Function]] = {}
    for item in items:
        if not hasattr(item, "callspec") or item.get_closest_marker("slow"):
            continue
        if item.get_closest_marker("sample"):
            assert isinstance(item, pytest.Function)
            grids.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in grids.values():
        limits = cases[0].get_closest_marker("sample").kwargs
        if "every" in limits:
            kept = cases[limits.get("first", 0) :: limits["every"]]
        else:
            kept = sample_of(cases, limits)
        for case in cases:
            if case not in kept:
                case.add_marker(pytest.mark.slow)


def sample_of(cases: list[pytest.Function], limits: dict[str, int]) -> list[pytest.Function]:
    orders: dict[str, list[int]] = {}  # of each parameter the ids of its values, as they come
    places: dict[pytest.Function, set[tuple[str, int]]] = {}
    for case in cases:
        places[case] = set()
        for name, value in case.callspec.params.items():
            order = orders.setdefault(name, [])
            if id(value) not in order:
                order.append(id(value))
            places[case].add((name, order.index(id(value))))
        if any(index >= limits.get(name, len(cases)) for name, index in places[case]):
            del places[case]
    kept: list[pytest.Function] = []
    missing = set[tuple[str, int]]().union(*places.values())
    while missing:
        kept.append(max(places, key=lambda case: len(places[case] & missing)))
        missing -= places[kept[-1]]
    return kept
