"""Kernels are tested on a GPU if there is one, else in Triton's interpreter.

Triton decides when it is imported, so the switch is set here: a chapter with kernels imports this
in its conftest.py, before any test module. On a machine with a GPU

    tests with the fixture `device`    compile their kernels and run on it: `-m gpu` (conftest.py)
    engines that name no device        run on the CPU, as in every other place (`beside_a_gpu`)
    kernels on tensors of the CPU      want the interpreter, so their test is skipped
"""

from __future__ import annotations

import importlib.util
import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch


def make_interpreter_fast() -> None:
    """For each function that a kernel calls it looks through its language for what to replace,
    and after each sum of integers whether there was room for it, which only `debug` would say: a
    third of a test's time."""
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    @cache
    def builtins_of(package: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if is_builtin(member)]

    def patch(package: Any, *rest: Any) -> None:
        for name in builtins_of(package):
            if is_builtin(member := getattr(package, name)):
                interpreter._patch_attr(package, name, member, *rest)

    interpreter._patch_builtin = patch
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if importlib.util.find_spec("triton") and os.environ["TRITON_INTERPRET"] == "1":
        make_interpreter_fast()


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@contextmanager
def beside_a_gpu() -> Iterator[None]:
    """Hide the GPU from engines whose device is "auto", here and in processes that tests start."""
    from common.engine_config import EngineConfig
    from kernel_launch import Launch

    resolve = EngineConfig.resolve_device
    launch = Launch.__call__

    def resolve_device(config: EngineConfig) -> torch.device:
        return torch.device("cpu") if config.device == "auto" else resolve(config)

    def launch_on_the_device(self: Launch, grid: tuple[int, ...], *arguments: Any) -> None:
        if any(isinstance(x, torch.Tensor) and x.device.type == "cpu" for x in arguments):
            pytest.skip("interpreted kernels: with a GPU they are compiled, and take no CPU tensor")
        launch(self, grid, *arguments)

    torch.cuda.init()  # it has read the environment then
    torch.cuda.device_count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineConfig, "resolve_device", resolve_device)
        patch.setattr(Launch, "__call__", launch_on_the_device)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield
