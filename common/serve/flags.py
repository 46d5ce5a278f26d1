"""Every field of `EngineConfig` as a flag: its name and default are read from there, so that they
are written only once.

See common/serve/README.md"""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from common.engine_config import EngineConfig
from common.serve.connectors import make_connector
from tiered_cache import KVTierConfig

NO_FLAG = {"model", "events"}  # a separate flag, or not expressible as text
# vLLM's names of parsers for the formats that this server parses. Some models that always think,
# and their templates, leave out `<think>`: an answer is a thought from its beginning, unless the
# prompt has ended the thought.
TOOL_CALL_PARSERS = ("hermes", "granite4")
ALWAYS_THINKING = ("deepseek_r1", "kimi_k2", "minimax_m2", "olmo3", "step3")
REASONING_PARSERS = (*ALWAYS_THINKING, "deepseek_v3", "glm45", "holo2", "mimo", "nemotron_v3")
REASONING_PARSERS += ("qwen3", "step3p5")


def add_engine_flags(group: argparse._ArgumentGroup) -> None:
    for field in dataclasses.fields(EngineConfig):
        if field.name not in NO_FLAG:
            group.add_argument(
                "--" + field.name.replace("_", "-"),
                type=_value,
                nargs="?",
                const=True,
                default=argparse.SUPPRESS,
                metavar="V",
                help=f"(default: {field.default})",
            )


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the `EngineConfig` fields given as flags. Raises `ValueError`."""
    names = {f.name for f in dataclasses.fields(EngineConfig)} - NO_FLAG
    given = {name: value for name, value in vars(args).items() if name in names}
    for name, make in (("kv_tiers", KVTierConfig), ("kv_connector", make_connector)):
        if isinstance(given.get(name), dict):
            try:
                given[name] = make(**given[name])
            except TypeError as error:  # a wrong name of a field
                raise ValueError(f"{name}: {error}") from error
    return given


def _value(text: str) -> Any:
    """Convert a flag's text; `EngineConfig` validates the value."""
    words = {"none": None, "true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return json.loads(text)
    except ValueError:
        return text
