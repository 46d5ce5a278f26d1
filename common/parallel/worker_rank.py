"""A worker's message handlers: one rank of the model, its KV memory, its runner.

See common/parallel/README.md#processes"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from common.assembly.assembly import Limits, LocalRunnerParts, load_draft, make_runner, packing_of
from common.engine_config import SHIPPED_CHECKPOINT, EngineConfig
from common.models.collectives import Collectives, connect
from common.models.loader import LoadedModel, checkpoint_digest, load_model
from common.models.model import DecoderModel
from common.models.ranks import Ranks
from common.parallel import message
from common.parallel.channel import START_TIMEOUT_S, Channel
from common.parallel.sharded_model import ShardedModel
from common.runner.kv_sizing import Peers
from kv_block_io import PagedBlockIO
from scheduler_interface import StepHandle, StepOutput
from speculating_runner import DraftLength

if TYPE_CHECKING:
    from common.features.adapters.adapter_files import Adapter

logger = logging.getLogger(__name__)


class Rank:
    """One rank. If a step is still running after `execute` returns, a thread sends the answer, so
    that the next step can begin."""

    def __init__(
        self,
        channel: Channel,
        config: EngineConfig,
        collectives: Collectives,
        local: LocalRunnerParts,
    ) -> None:
        self.channel = channel
        self.collectives = collectives
        self.local = local
        self.compares = config.check_invariants
        self.blocks = PagedBlockIO(local.kv_cache)
        self.num_plans = 0
        self._answering: ThreadPoolExecutor | None = None
        self._reader: ThreadPoolExecutor | None = None  # reads adapters while steps continue
        self._reading: dict[int, Future[Adapter]] = {}
        if local.device.type != "cpu":
            self._answering = ThreadPoolExecutor(1, thread_name_prefix="answers")

    # -- the start

    @classmethod
    def start(cls, channel: Channel) -> Rank:
        """Make a rank from the first message, which has its number and everything it needs. Sends
        the answer, which reports the result."""
        _, content = message.unpack(channel.receive(), {"start": message.TO_WORKER["start"]})
        name = f"[rank {content['rank']}] %(message)s"
        logging.basicConfig(level=content["log_level"], format=name, force=True)
        torch.set_num_threads(content["threads"])
        config = EngineConfig(**content["config"])
        ranks = Ranks(config.tensor_parallel_size, config.pipeline_parallel_size, content["rank"])
        device = _device_of(config, ranks)
        meeting = _Meeting(ranks, channel, content["meeting"])
        meeting.wait("imported")
        collectives = meeting.connect(device, config.worker_timeout_s)
        loaded = _load(config, device, collectives)
        draft = load_draft(config, loaded) if ranks.is_last_stage else None
        limits = Limits._make([*content["limits"], tuple(content["eos_token_ids"])])
        meeting.wait("loaded")
        peers = Peers(
            collectives.min_across if ranks.world_size > 1 else int,
            int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size)),
        )
        local = make_runner(
            config, loaded, draft, limits, wrap_length=DriverChosenLength, peers=peers
        )
        rank = cls(channel, config, collectives, local)
        facts = rank._facts(loaded)
        if content["has_connector"]:  # reads every weight
            _, namespace = local.block_io()
            facts["namespace"] = [list(pair) for pair in namespace]
        channel.send(message.pack("ready", facts=facts))
        return rank

    def _facts(self, loaded: LoadedModel) -> dict[str, Any]:
        kv_cache = self.local.kv_cache
        assert loaded.path is not None
        return {
            "pid": os.getpid(),
            "device": str(self.local.device),
            "dtype": str(loaded.model.embed_weight.dtype).removeprefix("torch."),
            "checkpoint": checkpoint_digest(loaded.path),
            "num_blocks": kv_cache.num_blocks,
            "kv_bytes_per_block": kv_cache.kv_bytes_per_block,
            "num_lookahead_tokens": self.local.num_lookahead_tokens,
        }

    # -- then

    def handle(self, data: bytes) -> bool:
        """Process a message. Returns whether it was the last one."""
        kind, content = message.unpack(data, message.TO_WORKER)
        if kind == "plan":
            self._execute(content)
        elif kind == "read":  # before the next step begins, which may write to the block
            block = self.blocks.read_block(content["block_id"])
            self._send(lambda: message.pack("block", data=block))
        elif kind == "write":
            self.blocks.write_block(content["block_id"], content["data"])
        elif kind == "adapter":
            self._read_adapter(content["number"], content["directory"])
        elif kind == "take":  # in the host's memory before any step that uses it
            reading = self._reading.pop(content["number"], None)
            if content["is_wanted"] and reading is not None and self.local.adapters is not None:
                self.local.adapters.take(reading.result())
        elif kind == "drop" and self.local.adapters is not None:
            self.local.adapters.drop(content["digest"])
        return kind == "close"

    def _read_adapter(self, number: int, directory: str) -> None:
        """Read an adapter in a thread, which also sends the answer."""
        assert self.local.adapters is not None
        self._reader = self._reader or ThreadPoolExecutor(1, thread_name_prefix="adapters")
        reading = self._reader.submit(self.local.adapters.read, directory)
        self._reading[number] = reading
        self._reader.submit(
            _send_or_report, self.channel, partial(_pack_adapter_answer, number, reading)
        )

    def _execute(self, content: dict[str, Any]) -> None:
        self.num_plans += 1
        length = self.local.speculation and self.local.speculation.draft_length
        if isinstance(length, DriverChosenLength):
            length.begin(content["step"], content["times"])
        handle = self.local.runner.execute(message.plan_from_map(content["plan"]))
        self._send(partial(self._answer_to, content["step"], handle))

    def _send(self, make: Callable[[], bytes | None]) -> None:
        if self._answering is None:
            _send(self.channel, make)
        else:
            self._answering.submit(_send_or_report, self.channel, make)

    def _answer_to(self, step: int, handle: StepHandle) -> bytes | None:
        output = handle.wait()
        is_output_rank = self.collectives.ranks.is_output_rank
        if not (is_output_rank or self.compares):
            return None
        found = message.output_to_map(output) if is_output_rank else None
        digest = self._digest(output) if self.compares else None
        return message.pack("output", step=step, output=found, digest=digest)

    def _digest(self, output: StepOutput) -> str | None:
        """The digest of the results that all ranks of the last stage must agree on."""
        if not self.collectives.ranks.is_last_stage:
            return None
        same = [output.token_ids, output.errors, output.draft_token_ids]
        return blake2b(repr(same).encode(), digest_size=16).hexdigest()

    def close(self) -> None:
        self.collectives.close()


def _pack_adapter_answer(number: int, reading: Future[Adapter]) -> bytes:
    found: dict[str, Any] = {"digest": None, "kind_of_error": "", "sentence": ""}
    try:
        found["digest"] = reading.result().digest
    except (ValueError, FileNotFoundError) as error:
        found |= {"kind_of_error": type(error).__name__, "sentence": str(error)}
    return message.pack("adapter", number=number, **found)


def _send(channel: Channel, make: Callable[[], bytes | None]) -> None:
    answer = make()
    if answer is not None:
        channel.send(answer)


def _send_or_report(channel: Channel, make: Callable[[], bytes | None]) -> None:
    """Send a message, or report the exception. Used in threads, where exceptions go unseen."""
    try:
        _send(channel, make)
    except BaseException as error:
        logger.exception("no answer to a step")
        channel.send(message.pack_error(error))


def _device_of(config: EngineConfig, ranks: Ranks) -> torch.device:
    if config.device != "cuda":
        return torch.device(config.device)
    index = int(os.environ["LOCAL_RANK"]) if "LOCAL_RANK" in os.environ else ranks.rank
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


class _Meeting:
    """Lets ranks wait for each other before collectives exist and before they are entered. A rank
    can take longer to import or to read than a collective waits."""

    def __init__(self, ranks: Ranks, channel: Channel, meeting: list) -> None:
        """`meeting` is the store's host and port, and this machine's address for the others."""
        host, port, own_host = meeting
        self.ranks = ranks
        self.own_host = own_host or channel.sock.getsockname()[0]
        dist: Any = torch.distributed
        self.store = dist.TCPStore(host, port, None, False) if ranks.world_size > 1 else None

    def wait(self, place: str) -> None:
        if self.store is not None:
            names = [f"{place} {rank}" for rank in range(self.ranks.world_size)]
            self.store.set(names[self.ranks.rank], "")
            self.store.wait(names, timedelta(seconds=START_TIMEOUT_S))

    def connect(self, device: torch.device, timeout_s: float) -> Collectives:
        return connect(self.ranks, self.store, device, timeout_s, self.own_host)


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


@dataclass(frozen=True, slots=True)
class _Unverified:
    step: int
    num_requests: int
    num_tokens: int
    num_rounds: int


class DriverChosenLength(DraftLength):
    """The number of draft tokens, where several ranks must propose the same ones. All ranks use the
    times of one rank, which the driver sends to all a step later."""

    def __init__(self, inner: DraftLength) -> None:
        self.inner = inner
        self._step = 0
        self._unverified: deque[_Unverified] = deque()

    def begin(self, step: int, times: list[list]) -> None:
        """`times`: step, milliseconds of verifying and of drafting, of steps before this one."""
        self._step = step
        for number, verify_ms, draft_ms in times:
            while self._unverified and self._unverified[0].step < number:
                self._unverified.popleft()  # the driver has never seen its end
            if self._unverified and self._unverified[0].step == number:
                seen = self._unverified.popleft()
                self.inner.observe_step(
                    seen.num_requests, seen.num_tokens, seen.num_rounds, verify_ms, draft_ms
                )

    def choose(self, request_ids: Any) -> list[int]:
        return self.inner.choose(request_ids)

    def observe(self, request_id: str, num_drafted: int, num_accepted: int) -> None:
        self.inner.observe(request_id, num_drafted, num_accepted)

    def observe_step(
        self, num_requests: int, num_tokens: int, num_rounds: int, verify_ms: float, draft_ms: float
    ) -> None:
        self._unverified.append(_Unverified(self._step, num_requests, num_tokens, num_rounds))

    def remove_request(self, request_id: str) -> None:
        self.inner.remove_request(request_id)
