"""The first line of a recorded run: the engine that ran, its settings, its model and its versions;
and the file that gets it.

See common/events/README.md#the-format-version-2"""

from __future__ import annotations

import dataclasses
import os
import platform
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch

from common.events.frames import VERSION
from policies import SchedulePolicy

if TYPE_CHECKING:
    from common.assembly.assembly import EngineParts
    from common.engine_config import EngineConfig

_PACKAGES = ("torch", "transformers", "tokenizers")


def check_place(events: str | Path | TextIO) -> None:
    if not isinstance(events, str | Path):
        return
    if Path(events).is_dir():
        raise ValueError(f"events must be a file, not a folder, got {str(events)!r}")
    if not Path(events).parent.is_dir():
        raise FileNotFoundError(f"events must be in an existing folder, got {str(events)!r}")


def open_file(path: Path) -> TextIO:
    # A lone surrogate is written as JSON's escape of it.
    return path.open("w", encoding="utf-8", errors="backslashreplace", newline="\n")


# -- the run line


def describe_run(config: EngineConfig, parts: EngineParts) -> dict[str, Any]:
    """Return the run line. `config` holds the settings by name; `num_blocks` includes the null
    block; `overlaps`: two steps can be in flight. With `windows` a request has one block table per
    window (0: no limit), and the cache holds no references: a block that no request holds is free,
    and findable until it is allocated. Left out without any window."""
    runner = parts.runner
    model = runner.model_config
    windows = getattr(parts.kv_memory, "windows", ())
    line = dict(
        kind="run",
        version=VERSION,
        started_at=round(time.time(), 3),
        scheduler=_name(config.scheduler),
        policy=_name(config.policy),
        prefix_cache=None if config.prefix_cache is None else _name(config.prefix_cache),
        block_size=config.block_size,
        num_blocks=runner.kv_cache.num_blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        overlaps=parts.in_flight_plans is not None,
        config={
            field.name: _plain(getattr(config, field.name))
            for field in dataclasses.fields(config)
            if field.name != "events"
        },
        model={
            "architecture": model.architecture,
            "num_parameters": runner.num_parameters,
            "num_layers": model.num_hidden_layers,
            "vocab_size": model.vocab_size,
            "device": str(runner.device),
            "dtype": str(runner.dtype).removeprefix("torch."),
        },
        versions={"python": platform.python_version(), **{p: version(p) for p in _PACKAGES}},
    )
    return line | ({"windows": [window or 0 for window in windows]} if windows else {})


def _name(part: Any) -> str:
    """Return the name of a part: the string that chose it, a policy's `name`, or the name of the
    part's class or factory function."""
    if isinstance(part, SchedulePolicy):
        return part.name
    return part if isinstance(part, str) else getattr(part, "__name__", type(part).__name__)


def _plain(value: Any) -> Any:
    """Convert a setting to JSON's types. A path becomes its name only, because films are shared."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, str | Path):  # an adapter's folder, say; a relative one too
        return Path(value).name if os.path.exists(value) or os.path.isabs(value) else str(value)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return _name(value)
