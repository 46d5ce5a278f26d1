"""The device on which kernels are tested."""

from common.tests.kernel_device import device

__all__ = ["device"]
