"""The imports of the process that others are forked from: libraries, and no module of ours that an
exhibit could change."""

import atexit
import gc
import os

# Asked otherwise, a GPU's driver would be started here, and be of no use in a forked process.
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

# A collection in a forked process would go through all of that, and so copy it.
gc.collect()
gc.freeze()
atexit.register(gc.unfreeze)
