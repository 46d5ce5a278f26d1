"""Write a run's event file: events are noted as they happen, and written once per step.

Events noted during a step are written together when the step has ended or failed; events between
two steps (arrivals, aborts) are written immediately. So a file is complete up to the last step
however the process ends, and nothing is encoded while a part of a step is timed."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import platform
import time
import weakref
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch

from common.events.event_kinds import VERSION, Cut, Event, Run, to_line
from common.requests.tokenizer import IncrementalDetokenizer, Tokenizer
from policies import SchedulePolicy

if TYPE_CHECKING:
    from common.engine_config import EngineConfig
    from common.models.model_config import ModelFacts
    from common.requests.output_processor import OutputProcessor
    from request import Request

logger = logging.getLogger(__name__)
_OWN_SETTINGS = ("speculative", "kv_tiers")  # configuration fields that are dataclasses
_PACKAGES = ("torch", "transformers", "tokenizers", "vllm-from-scratch")


class EventLog:
    """Writes a run to a file or a text stream. An existing file is overwritten; raises
    `ValueError` if the path is a folder, and `FileNotFoundError` if its folder does not exist. The
    first write that fails is logged, and nothing is written after it."""

    def __init__(self, events: str | Path | TextIO) -> None:
        if isinstance(events, str | Path):
            self._file = open_file(Path(events))
            self._close = weakref.finalize(self, self._file.close)
        else:
            self._file, self._close = events, events.flush  # the stream's owner closes it
        self._has_failed = False
        self._pending: list[Event] = []
        self._end: Event | None = None  # end of the step whose results are still being processed
        self._start = time.monotonic()
        self.in_step = False

    def now(self) -> float:
        """Seconds since the run line."""
        return round(time.monotonic() - self._start, 6)

    def since_start(self, monotonic: float) -> float:
        return round(monotonic - self._start, 6)

    def note(self, event: Event) -> None:
        self._pending.append(event)
        if not self.in_step:
            self.flush()

    @property
    def position(self) -> int:
        """Index of the next event within the current step."""
        return len(self._pending)

    def ends_with(self, event: Event) -> bool:
        """Whether `event` was noted last and is not written yet."""
        return bool(self._pending) and self._pending[-1] is event

    def note_at(self, position: int, event: Event) -> None:
        """Insert an event at an earlier `position`, before the events that it caused."""
        self._pending.insert(position, event)

    def end_step(self, event: Event) -> None:
        """Note `event` after all effects of the step's results. A stop string is found later, and
        still ends its request in this step. `flush` is called when no effect can follow."""
        self._end = event

    def close_step(self) -> None:
        """Note the last step's end event: no more effects of its results can follow."""
        if self._end is not None:
            self._pending.append(self._end)
            self._end, self.in_step = None, False

    def flush(self) -> None:
        """Write all noted events and flush the file (without `fsync`)."""
        self.close_step()
        pending, self._pending = self._pending, []
        if not pending or self._has_failed:
            return
        try:
            self._file.write("".join([f"{to_line(event)}\n" for event in pending]))
            self._file.flush()
        except Exception:  # a full disk, a closed pipe: no request ends because of that
            self._has_failed = True
            logger.exception("what happens is not written any more")

    def close(self) -> None:
        self.flush()
        try:
            self._close()
        except Exception:
            logger.exception("the file of events was not closed well")


def check_place(events: str | Path | TextIO) -> None:
    if not isinstance(events, str | Path):
        return
    path = Path(events)
    if path.is_dir():
        raise ValueError(f"events must be a file, not a folder, got {str(path)!r}")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"events must be in an existing folder, got {str(path)!r}")


def open_file(path: Path) -> TextIO:
    check_place(path)
    # A lone surrogate is written as JSON's escape of it.
    return path.open("w", encoding="utf-8", errors="backslashreplace", newline="\n")


# -- the run line


def describe_run(
    config: EngineConfig,
    facts: ModelFacts,
    num_blocks: int,
    overlaps: bool,
    windows: Sequence[int | None],
) -> Run:
    model = facts.config
    return Run(
        version=VERSION,
        started_at=round(time.time(), 3),
        scheduler=_name(config.scheduler),
        policy=_name(config.policy),
        prefix_cache=None if config.prefix_cache is None else _name(config.prefix_cache),
        block_size=config.block_size,
        num_blocks=num_blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        overlaps=overlaps,
        config={
            f.name: _plain(f.name, getattr(config, f.name))
            for f in dataclasses.fields(config)
            if f.name != "events"
        },
        model={
            "architecture": model.architecture,
            "num_parameters": facts.num_parameters,
            "num_layers": model.num_hidden_layers,
            "vocab_size": model.vocab_size,
            "device": str(facts.device),
            "dtype": str(facts.dtype).removeprefix("torch."),
        },
        versions={"python": platform.python_version(), **_versions()},
        windows=[window or 0 for window in windows],
    )


def _name(part: Any) -> str:
    """Return the name of a part: the string that chose it, a policy's `name`, or the name of the
    part's class or factory function."""
    if isinstance(part, SchedulePolicy):
        return part.name
    return part if isinstance(part, str) else getattr(part, "__name__", type(part).__name__)


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # a checkout that is not installed
            continue
    return found


def _plain(name: str, value: Any) -> Any:
    """Convert a setting to JSON's types. A path becomes its name only, because films are shared."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, str):  # an adapter's folder, say; a relative one too
        return Path(value).name if os.path.isabs(value) or os.path.exists(value) else value
    if isinstance(value, Mapping):
        return {key: _plain(key, item) for key, item in value.items()}
    if isinstance(value, Path):
        return value.name
    if name in _OWN_SETTINGS and dataclasses.is_dataclass(value):
        values = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return {key: _plain(key, item) for key, item in values.items()}
    return value.name if isinstance(value, SchedulePolicy) else type(value).__name__


# -- text


class TextDeltas:
    """The text that each token adds, for all requests. The engine decodes text lazily, so this
    class has separate decoders."""

    def __init__(self, members: Mapping[str, OutputProcessor], tokenizer: Tokenizer | None) -> None:
        self._members, self._tokenizer = members, tokenizer
        self._decoders: dict[str, IncrementalDetokenizer] = {}

    def begin(self, request: Request) -> list[str]:
        """Return the text that each prompt token adds; [] without a tokenizer."""
        tokenizer, prompt = self._tokenizer, request.prompt_token_ids
        if tokenizer is None:
            return []
        skips = request.sampling_params.skip_special_tokens
        self._decoders[request.request_id] = IncrementalDetokenizer(
            tokenizer, prompt, skip_special_tokens=skips
        )
        decoder = IncrementalDetokenizer(tokenizer, (), skip_special_tokens=False)
        return _pieces(decoder, prompt, is_last=True)

    def add(self, request: Request, token_ids: list[int]) -> list[str]:
        """Return the text that each new output token adds: "" for a token that stopped the
        request; [] without a tokenizer."""
        decoder = self._decoders.get(request.request_id)
        if decoder is None:
            return []
        is_hidden = not request.sampling_params.include_stop_str_in_output
        shown = token_ids[:-1] if request.finish_reason == "stop" and is_hidden else token_ids
        pieces = _pieces(decoder, shown, is_last=request.is_finished)
        if request.is_finished:
            del self._decoders[request.request_id]
        return pieces + [""] * (len(token_ids) - len(pieces))

    def end(self, request: Request) -> str:
        """Return the undecoded rest of a request that ended without a last token: "" or U+FFFD."""
        decoder = self._decoders.pop(request.request_id, None)
        return "" if decoder is None else "".join(_pieces(decoder, [], is_last=True))

    def cut_of(self, request_id: str) -> Cut | None:
        """Return a `Cut` if the engine has just found a stop string, else None."""
        member = self._members.get(request_id)
        stop_string = None if member is None else member.completion.stop_reason
        if member is None or not isinstance(stop_string, str):
            return None
        return Cut(request_id, stop_string, len(member.read_text()))


def _pieces(decoder: IncrementalDetokenizer, token_ids: list[int], is_last: bool) -> list[str]:
    pieces = []
    for token_id in token_ids:
        decoder.append(token_id)
        pieces.append(decoder.take_delta())
    if is_last:
        decoder.finish()
        if rest := decoder.take_delta():
            pieces[-1:] = ["".join([*pieces[-1:], rest])]
    return pieces


def label_of(extra_keys: object) -> str:
    """Return a short label of a tenant's cache keys that does not reveal them."""
    if not extra_keys:
        return ""
    return hashlib.blake2b(repr(extra_keys).encode(), digest_size=4).hexdigest()
