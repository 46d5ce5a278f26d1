"""The sampling parameters that a model's makers recommend, in its generation_config.json.

They hold where a request says nothing: `LLM.generate` without parameters, and a field that a body
of the server leaves out. Parameters that are given are used as they are, as in vLLM.

See common/README.md#what-a-request-may-ask-for"""

from __future__ import annotations

from typing import Any

from common.engine_config import SHIPPED_CHECKPOINT, EngineConfig
from common.models.loader import read_json, resolve_checkpoint
from common.sampling.sampling_rules import SAMPLING_RULES
from request import SamplingParams

FIELDS = {rule.name: rule.name for rule in SAMPLING_RULES if rule.is_recommended}
FIELDS |= {"max_new_tokens": "max_tokens"}  # by the name in the file


def sampling_defaults(config: EngineConfig) -> dict[str, Any]:
    """Return the recommended fields of `SamplingParams` with their values; none with
    `generation_config="vllm"`. Raises `ValueError`."""
    if config.generation_config == "vllm":
        return {}
    path = resolve_checkpoint(config.model or SHIPPED_CHECKPOINT) / "generation_config.json"
    found = read_json(path) if path.is_file() else {}
    defaults = {FIELDS[name]: found[name] for name in FIELDS if found.get(name) is not None}
    try:
        SamplingParams(**defaults)
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from error
    return defaults
