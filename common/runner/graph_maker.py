"""Choose whether and how decode steps are captured as graphs (`graphs.py`).

See common/README.md#graphs"""

from __future__ import annotations

import logging
from pkgutil import resolve_name
from typing import Any

from common.engine_config import EngineConfig, is_instance_arg
from common.models.model import DecoderModel
from common.runner.graphs import CannotCapture, CudaGraphs, DecodeGraphs
from paged_attention import AttentionBackend, PagedKVCache

logger = logging.getLogger(__name__)

# Of `emulate_graphs`: in place of `CudaGraphs`, and attention that they can replay.
EMULATOR = "common.tests.graph_emulator:EmulatedGraphs"
EMULATED_ATTENTION = "common.tests.tensor_attention:TensorAttentionBackend"


def make_graphs(
    config: EngineConfig,
    model: DecoderModel,
    kv_cache: PagedKVCache,
    backend: AttentionBackend,
    is_triton: bool,
    max_model_len: int,
    part: Any = None,
) -> DecodeGraphs | None:
    """Capture the decode steps over a KV cache. If that is impossible, return None and log a
    warning. `part`: see `DecodeGraphs`."""
    device = model.embed_weight.device
    reason = reason_without_graphs(config, model, is_triton)
    if reason is None:
        if config.speculative is not None:
            logger.warning("steps with draft tokens run without graphs: they are not decode steps")
        emulated = config.emulate_graphs
        try:
            return DecodeGraphs(
                graphs=resolve_name(EMULATOR)() if emulated else CudaGraphs(device),
                model=model,
                kv_cache=kv_cache,
                backend=backend if is_triton else resolve_name(EMULATED_ATTENTION)(),
                max_num_seqs=config.max_num_seqs,
                max_model_len=max_model_len,
                part=part,
            )
        except CannotCapture as error:
            reason = str(error)
    logger.warning("decode steps run without graphs: %s", reason)
    return None


def reason_without_graphs(config: EngineConfig, model: DecoderModel, is_triton: bool) -> str | None:
    device = model.embed_weight.device
    ranks = model.collectives.ranks
    if config.batch_invariant:
        return "batch_invariant=True computes on the host's plan"
    if device.type == "cpu" and config.wants_compiled(model.num_parameters, device):
        return "PyTorch cannot capture compiled code"
    if is_instance_arg(config.attention_backend):
        return "this attention_backend may plan on the host"
    if not is_triton and device.type == "cuda":
        return "attention in PyTorch is planned on the host"
    if ranks.pipeline_parallel_size > 1:
        return "a stage waits for the stage before it in the middle of its step"
    if config.emulate_graphs and ranks.world_size > 1:
        return "the emulator cannot capture communication between ranks"
    return None
