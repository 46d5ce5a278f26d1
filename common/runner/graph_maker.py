"""Choose whether and how decode steps are captured as graphs (`graphs.py`).

See common/README.md#graphs"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pkgutil import resolve_name

from common.engine_config import EngineConfig, is_instance_arg
from common.models.model import DecoderModel
from common.runner.graphs import CannotCapture, CudaGraphs, DecodeGraphs, GraphPart, Graphs
from paged_attention import AttentionBackend, PagedKVCache

logger = logging.getLogger(__name__)

# Of `emulate_graphs`: `Graphs`, and attention that they can replay.
EMULATOR = "common.tests.graph_emulator:EmulatedGraphs"
EMULATED_ATTENTION = "common.tests.tensor_attention:TensorAttentionBackend"


@dataclass(slots=True)
class GraphMaker:
    """Captures the decode steps over a KV cache. If that is impossible, `of` and the call return
    None and log a warning."""

    config: EngineConfig
    model: DecoderModel
    backend: AttentionBackend
    max_model_len: int
    parts: Sequence[GraphPart] = ()
    is_possible: bool = True

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        model: DecoderModel,
        backend: AttentionBackend,
        is_triton: bool,
        max_model_len: int,
        parts: Sequence[GraphPart] = (),
    ) -> GraphMaker | None:
        device = model.embed_weight.device
        ranks = model.collectives.ranks
        reason = None
        if config.batch_invariant:
            reason = "batch_invariant=True computes on the host's plan"
        elif config.wants_compiled(model.num_parameters, device):
            reason = "PyTorch cannot capture compiled code"
        elif is_instance_arg(config.attention_backend):
            reason = "this attention_backend may plan on the host"
        elif not is_triton and device.type == "cuda":
            reason = "attention in PyTorch is planned on the host"
        elif ranks.pipeline_parallel_size > 1:
            reason = "a stage waits for the stage before it in the middle of its step"
        elif config.emulate_graphs and ranks.world_size > 1:
            reason = "the emulator cannot capture communication between ranks"
        if reason is not None:
            logger.warning("decode steps run without graphs: %s", reason)
            return None
        if config.speculative is not None:
            logger.warning("steps with draft tokens run without graphs: they are not decode steps")
        if not is_triton:
            backend = resolve_name(EMULATED_ATTENTION)()
        return cls(config, model, backend, max_model_len, parts)

    def __call__(self, kv_cache: PagedKVCache) -> DecodeGraphs | None:
        if not self.is_possible:
            return None
        try:
            graphs = self._capture(kv_cache)
            graphs.beside = {part.name: self._capture(kv_cache, part) for part in self.parts}
            return graphs
        except CannotCapture as error:
            logger.warning("decode steps run without graphs: %s", error)
            self.is_possible = False
            return None

    def _capture(self, kv_cache: PagedKVCache, part: GraphPart | None = None) -> DecodeGraphs:
        return DecodeGraphs(
            graphs=self._make(),
            model=self.model,
            kv_cache=kv_cache,
            backend=self.backend,
            max_num_seqs=self.config.max_num_seqs,
            max_model_len=self.max_model_len,
            part=part,
        )

    def _make(self) -> Graphs:
        if self.config.emulate_graphs:
            return resolve_name(EMULATOR)()
        return CudaGraphs(self.model.embed_weight.device)
