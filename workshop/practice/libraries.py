"""The imports of the process that others are forked from: libraries, and no module of ours that an
exhibit could change."""

import atexit
import gc
import os

# Query CUDA through NVML: other queries start the GPU driver here, which is useless in a fork.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import hypothesis.stateful
import pytest
import transformers

import common.tests.kernel_device  # before transformers' models: it decides how Triton is imported

# Lazily imported names: accessing them here imports their modules.
LOADED = (
    hypothesis.stateful,
    pytest,
    transformers.LlamaForCausalLM,
    transformers.Qwen3Config,
    transformers.Qwen3ForCausalLM,
    common.tests.kernel_device,
)

# A garbage collection in a forked process would visit all these objects, and so copy their pages.
gc.collect()
gc.freeze()
atexit.register(gc.unfreeze)
