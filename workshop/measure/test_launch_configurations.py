"""An engine launches only the configurations of `launch_configurations`: nothing is compiled while
serving, and the check of `test_resources.py` has seen every one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from common.assembly.assembly import set_regions
from common.engine import EngineConfig, LLMEngine
from common.models.loader import load_model
from common.tests.engine_oracle import serve
from common.tests.model_cases import save_case
from common.tests.paged_harness import PagedHarness
from common.tests.small_models import subject
from kernel_launch import TRITON_TYPES, Launch
from request import SamplingParams
from workshop.measure.launch_configurations import attention_shape, launch_configurations

pytestmark = pytest.mark.needs("triton")

CPU = torch.device("cpu")
ENGINES: dict[str, dict[str, Any]] = {
    "chunks": {"max_num_batched_tokens": 24},
    "whole prompts": {"chunked_prefill": False},
    "look-up": {"speculative": {"method": "ngram", "num_spec_tokens": 5}},
    "draft model": {"speculative": {"method": "draft", "num_spec_tokens": 2, "adaptive": False}},
}


def type_of(value: Any, is_aligned: bool) -> str:
    if isinstance(value, torch.Tensor):
        # On a GPU memory begins at such an address; a view may not.
        offset = value.storage_offset() * value.itemsize
        assert not is_aligned or offset % 16 == 0, "it would be compiled anew"
        return "*" + TRITON_TYPES[value.dtype]
    assert isinstance(value, float) or -(2**31) <= value < 2**31
    return "fp32" if isinstance(value, float) else "i32"


def identity(launch: Launch, types: dict[str, str]) -> str:
    """Two launches of one identity are one compilation."""
    parts = sorted(types.items()), sorted(launch.constants.items()), launch.options
    return f"{launch.kernel.__name__} {parts}"


@pytest.fixture
def launched(monkeypatch) -> list[tuple[str, str]]:
    """Kernel and identity of every launch, with the types that the arguments really had."""
    found: list[tuple[str, str]] = []
    real = Launch.__call__

    def spy(launch: Launch, grid: tuple[int, ...], *arguments: Any) -> None:
        names = launch.kernel.arg_names[: len(arguments)]
        types = {
            name: type_of(value, name not in launch.unaligned)
            for name, value in zip(names, arguments, strict=True)
        }
        found.append((launch.kernel.__name__, identity(launch, types)))
        real(launch, grid, *arguments)

    monkeypatch.setattr(Launch, "__call__", spy)
    return found


def must_be_listed(launched, *models, engine: EngineConfig, dtype=torch.float32) -> None:
    known = set()
    for model in models:
        shape = attention_shape(model.config, engine, dtype)
        allowed = launch_configurations(model.config, engine, shape, model.groups.windows)
        known |= {identity(launch, dict(launch.arguments)) for launch in allowed}
    unknown = {kernel for kernel, key in launched if key not in known}
    assert launched and not unknown, f"{unknown} would be compiled while serving"


@pytest.mark.sample(every=4)  # chunks that sample in every way
@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_launches_nothing_else_and_agrees_with_the_oracle(name, random_oracle, launched):
    config = EngineConfig(num_blocks=100, attention_backend="triton", **ENGINES[name])
    target, draft = (load_model(random_oracle.path, torch.float32, CPU) for _ in range(2))
    engine = LLMEngine(config, loaded=target, draft=draft if name == "draft model" else None)
    if name == "look-up":  # whose drafts come late
        serve(engine, random_oracle, [0, 1, 2, 3, 4, 5], 9)
    else:
        serve(engine, random_oracle, [0, 1, 3], 4)
    samples_all = name == "chunks"
    # A drawn seed and no `top_k`: drafts of a model have probabilities.
    params = SamplingParams(temperature=0.8, max_tokens=1 if samples_all else 3)
    engine.generate_batch(random_oracle.prompts[:2], params)
    for top_k in (0, 5) if samples_all else ():
        params = SamplingParams(top_k=top_k, top_p=0.9, presence_penalty=0.1, max_tokens=1)
        engine.generate_batch(random_oracle.prompts[:1], params)
    models = [target.model, draft.model] if name == "draft model" else [target.model]
    must_be_listed(launched, *models, engine=config)


@pytest.mark.parametrize("name", ["gemma3", "llama-biases"])
def test_a_model_of_kernels_launches_listed_ones_and_has_the_logits_of_float64(
    name, tmp_path, launched
):
    """With norms in float32, and with none of heads; in bfloat16, where tensors are plain."""
    path = save_case(name, tmp_path)
    work = [(0, 0, [3, 1, 4])]
    expected = PagedHarness(load_model(path, torch.float64).model, 1).step(work)
    model = load_model(path, torch.bfloat16).model
    set_regions(model, is_compiled=False, is_triton=True)
    found = PagedHarness(model, 1, block_size=16).step(work).double()
    assert (found - expected).abs().max() <= 0.2 * expected.abs().max()
    engine = EngineConfig(block_size=16, attention_backend="triton")
    must_be_listed(launched, model, engine=engine, dtype=torch.bfloat16)
    kernels = {kernel for kernel, _ in launched}
    assert kernels >= {"_add_rms_norm_kernel", "_rotate_and_write_kernel"}


def test_a_window_is_a_constant_that_was_foreseen(launched):
    loaded = subject("one in three").in_float32
    engine = EngineConfig(num_blocks=100, max_model_len=64, attention_backend="triton")
    params = SamplingParams(temperature=0, max_tokens=2)
    LLMEngine(engine, loaded=loaded).generate_batch([[*range(20)]], params)
    must_be_listed(launched, loaded.model, engine=engine)
    assert any("('WINDOW', 5)" in key for _, key in launched)
