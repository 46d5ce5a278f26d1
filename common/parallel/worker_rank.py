"""A worker's message handlers: one rank of the model, its KV memory, its runner.

See common/parallel/README.md#processes"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed

from common.assembly.assembly import RunnerParts, load_draft, make_runner, packing_of
from common.engine_config import SHIPPED_CHECKPOINT, EngineConfig
from common.models.collectives import Collectives
from common.models.loader import load_model
from common.models.ranks import Ranks
from common.parallel import message
from common.parallel.channel import WorkerChannel
from common.parallel.executor import START_TIMEOUT_S
from common.parallel.sharded_model import ShardedModel
from common.runner.kv_sizing import Peers
from kv_block_io import PagedBlockIO
from scheduler_interface import RunnerInput, StepHandle

logger = logging.getLogger(__name__)
dist: Any = torch.distributed  # its type stubs lack what is needed here


class Rank:
    """One rank. If a step is still running after `execute` returns, a thread sends the answer, so
    that the next step can begin."""

    def __init__(
        self,
        channel: WorkerChannel,
        config: EngineConfig,
        collectives: Collectives,
        local: RunnerParts,
    ) -> None:
        self.channel = channel
        self.collectives = collectives
        self.local = local
        self.compares = config.check_invariants
        self.blocks = PagedBlockIO(local.kv_cache)
        self._answering = ThreadPoolExecutor(1, thread_name_prefix="answers")

    # -- the start

    @classmethod
    def start(cls, channel: WorkerChannel) -> Rank:
        """Make a rank from the first message, which has its number and everything it needs. Sends
        the answer, which reports the result."""
        _, content = message.unpack(channel.receive())
        name = f"[rank {content['rank']}] %(message)s"
        logging.basicConfig(level=content["log_level"], format=name, force=True)
        torch.set_num_threads(content["threads"])
        config: EngineConfig = content["config"]
        ranks = Ranks(config.tensor_parallel_size, config.pipeline_parallel_size, content["rank"])
        device = torch.device(config.device)
        if device.type == "cuda":
            device = torch.device("cuda", ranks.rank)
            torch.cuda.set_device(device)
        store = dist.TCPStore("127.0.0.1", content["store_port"], None, False)
        _meet(store, ranks, "imported")
        collectives = Collectives.connect(ranks, store, device, config.worker_timeout_s)
        loaded = load_model(
            config.model or SHIPPED_CHECKPOINT,
            dtype=config.dtype,
            device=device,
            make=partial(ShardedModel, collectives=collectives),
            packing_of=partial(packing_of, config, is_loading=True),
        )
        draft = load_draft(config, loaded) if ranks.is_last_stage else None
        _meet(store, ranks, "loaded")
        local = make_runner(
            config=config,
            loaded=loaded,
            draft=draft,
            limits=content["limits"],
            peers=Peers(collectives.min_across, ranks.world_size),
        )
        facts: dict[str, Any] = {
            "device": local.device,
            "dtype": loaded.model.embed_weight.dtype,
            "num_blocks": local.kv_cache.num_blocks,
            "kv_bytes_per_block": local.kv_cache.kv_bytes_per_block,
            "num_lookahead_tokens": local.num_lookahead_tokens,
        }
        if content["has_connector"]:  # reads every weight
            _, facts["namespace"] = local.block_io()
        channel.send(message.pack("ready", number=message.START, facts=facts))
        return cls(channel, config, collectives, local)

    # -- then

    def handle(self, data: bytes) -> bool:
        """Call the method that a message names. Returns whether more can come."""
        kind, content = message.unpack(data)
        getattr(self, kind)(**content)
        return kind != "close"

    def plan(self, number: int, plan: RunnerInput) -> None:
        """Begin a step."""
        step = self.local.runner.execute(plan)
        if self.local.device.type == "cpu":
            self._answer_plan(number, step)
        else:
            self._answering.submit(self._answer_in_thread, number, step)

    def _answer_in_thread(self, number: int, step: StepHandle) -> None:
        try:
            self._answer_plan(number, step)
        except BaseException as error:  # seen nowhere else
            logger.exception("the answer to step %d has failed", number)
            self.channel.send(message.pack_error(error))

    def _answer_plan(self, number: int, step: StepHandle) -> None:
        output = step.wait()
        ranks = self.collectives.ranks
        if ranks.is_output_rank or (self.compares and ranks.is_last_stage):
            self._answer(number, output=output)

    def _answer(self, number: int, **content: Any) -> None:
        self.channel.send(message.pack("answer", number=number, **content))

    def read_block(self, number: int, block_id: int) -> None:
        """Before the next step begins, which may write to the block."""
        self._answer(number, data=self.blocks.read_block(block_id))

    def write_block(self, block_id: int, data: bytes) -> None:
        self.blocks.write_block(block_id, data)

    def load_adapter(self, number: int, directory: str) -> None:
        """Read an adapter for later steps."""
        assert self.local.adapters is not None
        digest = kind_of_error = sentence = ""
        try:
            digest = self.local.adapters.load(directory)
        except (ValueError, FileNotFoundError) as error:
            kind_of_error = type(error).__name__
            sentence = str(error)
        self._answer(number, digest=digest, kind_of_error=kind_of_error, sentence=sentence)

    def drop_adapter(self, digest: str) -> None:
        assert self.local.adapters is not None
        self.local.adapters.drop(digest)

    def close(self) -> None:
        self.collectives.close()


def _meet(store: Any, ranks: Ranks, place: str) -> None:
    """Wait for the other ranks, before collectives exist and before they are entered: a rank can
    take longer to import or to read than a collective waits."""
    names = [f"{place} {rank}" for rank in range(ranks.world_size)]
    store.set(names[ranks.rank], "")
    store.wait(names, timedelta(seconds=START_TIMEOUT_S))
