"""A worker's message handlers: one rank of the model, its KV memory, its runner.

See common/parallel/README.md#processes"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed

from common.assembly.assembly import Limits, LocalRunnerParts, load_draft, make_runner, packing_of
from common.engine_config import SHIPPED_CHECKPOINT, EngineConfig
from common.models.collectives import Collectives
from common.models.loader import LoadedModel, checkpoint_digest, load_model
from common.models.model import DecoderModel
from common.models.ranks import Ranks
from common.parallel import message
from common.parallel.channel import WorkerChannel
from common.parallel.executor import START_TIMEOUT_S
from common.parallel.sharded_model import ShardedModel
from common.runner.kv_sizing import Peers
from kv_block_io import PagedBlockIO
from scheduler_interface import StepHandle, StepOutput
from speculating_runner import DraftLength

if TYPE_CHECKING:
    from common.features.adapters.adapter_files import Adapter

logger = logging.getLogger(__name__)
T = TypeVar("T")
dist: Any = torch.distributed  # its type stubs lack what is needed here


class Rank:
    """One rank. If a step is still running after `execute` returns, a thread sends the answer, so
    that the next step can begin."""

    def __init__(
        self,
        channel: WorkerChannel,
        config: EngineConfig,
        collectives: Collectives,
        local: LocalRunnerParts,
    ) -> None:
        self.channel = channel
        self.collectives = collectives
        self.local = local
        self.compares = config.check_invariants
        self.blocks = PagedBlockIO(local.kv_cache)
        self._answering = ThreadPoolExecutor(1, thread_name_prefix="answers")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self._reading: dict[int, Future[Adapter | None]] = {}  # adapters, while steps continue

    # -- the start

    @classmethod
    def start(cls, channel: WorkerChannel) -> Rank:
        """Make a rank from the first message, which has its number and everything it needs. Sends
        the answer, which reports the result."""
        _, content = message.unpack(channel.receive(), {"start": message.TO_WORKER["start"]})
        name = f"[rank {content['rank']}] %(message)s"
        logging.basicConfig(level=content["log_level"], format=name, force=True)
        torch.set_num_threads(content["threads"])
        config = EngineConfig(**content["config"])
        ranks = Ranks(config.tensor_parallel_size, config.pipeline_parallel_size, content["rank"])
        device = torch.device(config.device)
        if device.type == "cuda":
            device = torch.device("cuda", ranks.rank)
            torch.cuda.set_device(device)
        store = dist.TCPStore("127.0.0.1", content["store_port"], None, False)
        _meet(store, ranks, "imported")
        collectives = Collectives.connect(ranks, store, device, config.worker_timeout_s)
        loaded = _load(config, device, collectives)
        draft = load_draft(config, loaded) if ranks.is_last_stage else None
        limits = Limits._make([*content["limits"], tuple(content["eos_token_ids"])])
        _meet(store, ranks, "loaded")
        local = make_runner(
            config=config,
            loaded=loaded,
            draft=draft,
            limits=limits,
            wrap_length=DriverChosenLength,
            peers=Peers(collectives.min_across, ranks.world_size),
        )
        rank = cls(channel, config, collectives, local)
        facts = rank._facts(loaded)
        if content["has_connector"]:  # reads every weight
            _, namespace = local.block_io()
            facts["namespace"] = [list(pair) for pair in namespace]
        channel.send(message.pack("ready", number=message.START, facts=facts))
        return rank

    def _facts(self, loaded: LoadedModel) -> dict[str, Any]:
        kv_cache = self.local.kv_cache
        assert loaded.path is not None
        return {
            "device": str(self.local.device),
            "dtype": str(loaded.model.embed_weight.dtype).removeprefix("torch."),
            "checkpoint": checkpoint_digest(loaded.path),
            "num_blocks": kv_cache.num_blocks,
            "kv_bytes_per_block": kv_cache.kv_bytes_per_block,
            "num_lookahead_tokens": self.local.num_lookahead_tokens,
        }

    # -- then

    def handle(self, data: bytes) -> bool:
        """Process a message. Returns whether more can come."""
        kind, content = message.unpack(data, message.TO_WORKER)
        adapters = self.local.adapters
        if kind == "plan":
            self._execute(content)
        elif kind == "read":  # before the next step begins, which may write to the block
            block = self.blocks.read_block(content["block_id"])
            self.channel.send(message.pack("block", number=content["number"], data=block))
        elif kind == "write":
            self.blocks.write_block(content["block_id"], content["data"])
        elif kind == "adapter":
            read = partial(self._read_adapter, content["number"], content["directory"])
            self._reading[content["number"]] = self._reader.submit(self._reported, read)
        elif kind == "take":  # in the host's memory before any step that uses it
            reading = self._reading.pop(content["number"])
            adapter = reading.result() if content["is_wanted"] else None
            if adapter is not None and adapters is not None:
                adapters.take(adapter)
        elif kind == "drop" and adapters is not None:
            adapters.drop(content["digest"])
        return kind != "close"

    def _execute(self, content: dict[str, Any]) -> None:
        length = self.local.speculation and self.local.speculation.draft_length
        if isinstance(length, DriverChosenLength):
            length.begin(content["number"], content["times"])
        handle = self.local.runner.execute(content["plan"])
        answer = partial(self._answer, content["number"], handle)
        if self.local.device.type == "cpu":
            answer()
        else:
            self._answering.submit(self._reported, answer)

    def _answer(self, number: int, handle: StepHandle) -> None:
        output = handle.wait()
        ranks = self.collectives.ranks
        if ranks.is_output_rank or self.compares:
            found = output if ranks.is_output_rank else None
            digest = _digest(output) if self.compares and ranks.is_last_stage else None
            self.channel.send(message.pack("output", number=number, output=found, digest=digest))

    def _read_adapter(self, number: int, directory: str) -> Adapter | None:
        assert self.local.adapters is not None
        found: dict[str, Any] = {"digest": None, "kind_of_error": "", "sentence": ""}
        adapter = None
        try:
            adapter = self.local.adapters.read(directory)
            found["digest"] = adapter.digest
        except (ValueError, FileNotFoundError) as error:
            found |= {"kind_of_error": type(error).__name__, "sentence": str(error)}
        self.channel.send(message.pack("adapter", number=number, **found))
        return adapter

    def _reported(self, work: Callable[[], T]) -> T:
        """Do `work` in a thread, where nobody else would see an exception."""
        try:
            return work()
        except BaseException as error:
            logger.exception("a thread of this rank has failed")
            self.channel.send(message.pack_error(error))
            raise

    def close(self) -> None:
        self.collectives.close()


def _digest(output: StepOutput) -> str:
    """The digest of the results that all ranks of the last stage must agree on."""
    same = [output.token_ids, output.errors, output.draft_token_ids]
    return blake2b(repr(same).encode(), digest_size=16).hexdigest()


def _meet(store: Any, ranks: Ranks, place: str) -> None:
    """Wait for the other ranks, before collectives exist and before they are entered: a rank can
    take longer to import or to read than a collective waits."""
    names = [f"{place} {rank}" for rank in range(ranks.world_size)]
    store.set(names[ranks.rank], "")
    store.wait(names, timedelta(seconds=START_TIMEOUT_S))


def _load(config: EngineConfig, device: torch.device, collectives: Collectives) -> LoadedModel:
    make = DecoderModel
    if collectives.ranks.world_size > 1:
        make = partial(ShardedModel, collectives=collectives)
    return load_model(
        config.model or SHIPPED_CHECKPOINT,
        dtype=config.dtype,
        device=device,
        make=make,
        packing_of=partial(packing_of, config, is_loading=True),
    )


class DriverChosenLength(DraftLength):
    """The number of draft tokens, where several ranks must propose the same ones. All ranks use the
    times of one rank, which the driver sends to all a step later."""

    def __init__(self, inner: DraftLength) -> None:
        self.inner = inner
        self._step = 0
        self._unverified: dict[int, Callable[[float, float], None]] = {}  # by step: takes its times

    def begin(self, step: int, times: list[list]) -> None:
        """`times`: step, milliseconds of verifying and of drafting, of steps before this one."""
        self._step = step
        for number, verify_ms, draft_ms in times:
            if number in self._unverified:
                self._unverified.pop(number)(verify_ms, draft_ms)

    def choose(self, request_ids: Any) -> list[int]:
        return self.inner.choose(request_ids)

    def observe(self, request_id: str, num_drafted: int, num_accepted: int) -> None:
        self.inner.observe(request_id, num_drafted, num_accepted)

    def observe_step(
        self, num_requests: int, num_tokens: int, num_rounds: int, verify_ms: float, draft_ms: float
    ) -> None:
        self._unverified[self._step] = partial(
            self.inner.observe_step, num_requests, num_tokens, num_rounds
        )

    def remove_request(self, request_id: str) -> None:
        self.inner.remove_request(request_id)
