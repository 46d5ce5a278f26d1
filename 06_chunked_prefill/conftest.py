"""The device and the numbers of threads with which kernels are tested."""

from collections.abc import Iterator

import pytest
import torch

from common.tests.kernel_device import device

__all__ = ["device"]


@pytest.fixture(params=[1, 2, 3])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
