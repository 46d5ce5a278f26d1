"""torch's number of threads: the model's size decides, the user's choice stays, and afterwards the
number is what it was. (Trap 89: a small model on two threads, far slower beside a busy program.)"""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from common.assembly import assembly
from common.engine import LLMEngine
from common.engine_config import THREADS_FROM_PARAMETERS, EngineConfig
from common.runner import thread_count
from common.runner.thread_count import ThreadCount, set_threads
from workshop.measure.bench.random_weights import QWEN3_0_6B, random_model

CPU = torch.device("cpu")
TINY = replace(QWEN3_0_6B, vocab_size=89, hidden_size=32, num_hidden_layers=1, intermediate_size=40)
SMALL, LARGE = THREADS_FROM_PARAMETERS - 1, THREADS_FROM_PARAMETERS


@pytest.fixture(autouse=True)
def four(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process in which torch has 4 threads by default."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    monkeypatch.setattr(thread_count, "THREADS", ThreadCount())
    monkeypatch.setattr(thread_count, "_is_chosen", lambda: False)
    yield
    torch.set_num_threads(before)


def make_engine() -> LLMEngine:
    config = EngineConfig(num_blocks=20, max_model_len=64)
    return LLMEngine(config, loaded=random_model(TINY, 1, torch.float32))


def test_an_engine_gives_the_threads_back_however_it_ends(monkeypatch):
    """A small model is computed by one, until its engine is closed, anywhere and more than once,
    is forgotten, or was never made."""
    engine = make_engine()
    assert torch.get_num_threads() == 1
    elsewhere = threading.Thread(target=engine.close)
    elsewhere.start()
    elsewhere.join()
    engine.close()
    assert thread_count._in_new_thread(torch.get_num_threads) == 4
    make_engine().close()
    assert torch.get_num_threads() == 4
    engine = make_engine()
    torch.set_num_threads(3)  # by the user, while it is open
    make_engine().close()
    assert torch.get_num_threads() == 3
    engine.close()
    torch.set_num_threads(4)
    make_engine()
    gc.collect()
    assert torch.get_num_threads() == 4
    monkeypatch.setattr(assembly, "LocalRunner", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        make_engine()
    assert torch.get_num_threads() == 4


@pytest.mark.net
@pytest.mark.parametrize("order", [*itertools.permutations(range(4))])
def test_engines_closed_in_any_order_leave_a_right_number(order):
    """The number is that of the newest open engine with an explicit one, else the largest
    default."""
    settings = {0: (None, SMALL, 1), 1: (None, LARGE, 4), 2: (2, LARGE, 2), 3: (3, SMALL, 3)}
    open_engines, seen = {}, []
    for i, (given, num_parameters, _) in settings.items():
        open_engines[i] = set_threads(given, num_parameters, CPU)
        seen.append(torch.get_num_threads())
    assert seen == [1, 4, 2, 3]
    for i in order:
        open_engines.pop(i)()
        explicit = [settings[j][2] for j in open_engines if j >= 2]
        defaults = [settings[j][2] for j in open_engines if j < 2]
        assert torch.get_num_threads() == (explicit or [max(defaults, default=4)])[-1]


ASK = """
import os, torch
if os.environ.get("SET"):
    torch.set_num_threads(int(os.environ["SET"]))
before = torch.get_num_threads()
from common.runner.thread_count import set_threads
set_threads(None, 9, torch.device("cpu"))
print(before, torch.get_num_threads())
"""


@pytest.mark.parametrize("chosen", [{"OMP_NUM_THREADS": "2"}, {"SET": "2"}])
def test_a_number_chosen_before_the_first_engine_is_seen(chosen):
    """Also where it is the number that torch would have had."""
    environment = {k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS")} | chosen
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    if chosen.get("SET") and not torch.backends.mkl.is_available():
        pytest.skip("this build of torch does not show it")
    command = [sys.executable, "-c", ASK]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    before, now = map(int, run.stdout.split())
    assert now == before
