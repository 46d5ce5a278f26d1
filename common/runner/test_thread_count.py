"""torch's number of threads: the model's size decides, the user's choice stays, and afterwards the
number is what it was. (Trap 89: a small model on two threads, far slower beside a busy program.)"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from common.assembly import assembly
from common.engine import LLMEngine
from common.engine_config import THREADS_FROM_PARAMETERS, EngineConfig
from common.runner import thread_count
from common.runner.thread_count import set_threads
from workshop.measure.bench.random_weights import QWEN3_0_6B, random_model

CPU = torch.device("cpu")
TINY = replace(QWEN3_0_6B, vocab_size=89, hidden_size=32, num_hidden_layers=1, intermediate_size=40)
SMALL = THREADS_FROM_PARAMETERS - 1
LARGE = THREADS_FROM_PARAMETERS


@pytest.fixture(autouse=True)
def four(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process in which torch has 4 threads by default."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    monkeypatch.setattr(thread_count, "_numbers", {})
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    yield
    torch.set_num_threads(before)


def make_engine() -> LLMEngine:
    config = EngineConfig(num_blocks=20, max_model_len=64)
    return LLMEngine(config, loaded=random_model(TINY, 1, torch.float32))


def test_an_engine_gives_the_threads_back_however_it_ends(monkeypatch):
    """A small model is computed by one, until its engine is closed, once or more than once, is
    forgotten, or was never made."""
    engine = make_engine()
    assert torch.get_num_threads() == 1
    engine.close()
    engine.close()
    assert torch.get_num_threads() == 4
    make_engine().close()
    assert torch.get_num_threads() == 4
    make_engine()
    gc.collect()
    assert torch.get_num_threads() == 4
    monkeypatch.setattr(assembly, "make_runner", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        make_engine()
    assert torch.get_num_threads() == 4


@pytest.mark.net
@pytest.mark.parametrize("order", [*itertools.permutations(range(4))])
def test_engines_closed_in_any_order_leave_a_right_number(order):
    """The number is that of the newest open engine."""
    settings = {0: (None, SMALL, 1), 1: (None, LARGE, 4), 2: (2, LARGE, 2), 3: (3, SMALL, 3)}
    open_engines = {}
    seen = []
    for i, (given, num_parameters, _) in settings.items():
        open_engines[i] = set_threads(given, num_parameters, CPU)
        seen.append(torch.get_num_threads())
    assert seen == [1, 4, 2, 3]
    for i in order:
        open_engines.pop(i)()
        assert torch.get_num_threads() == [4, *(settings[j][2] for j in open_engines)][-1]


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_a_number_in_the_environment_decides(name, monkeypatch):
    monkeypatch.setenv(name, "4")
    make_engine().close()
    end = set_threads(None, SMALL, CPU)
    assert torch.get_num_threads() == 4
    end()
