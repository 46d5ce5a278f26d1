"""`InputProcessor`: validates prompts and parameters, and makes the requests of one group.

Nothing here changes the engine's state, so a rejected request leaves no trace.

See common/README.md"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from hashlib import blake2b
from importlib.util import find_spec
from numbers import Integral, Real
from typing import Any, TypedDict

from common.requests.output_processor import OutputProcessor, RequestGroup
from common.requests.tokenizer import Tokenizer
from kv_memory import KeyedRequest
from request import SamplingParams, check_integers, require

Prompt = str | Sequence[int]  # or a one-dimensional integer array or tensor
TOKEN_RULE_FIELDS = "allowed_token_ids", "bad_words", "logit_bias"  # fields (`token_rules.py`)
MAX_SAMPLES = 16_384  # of a prompt, as in vLLM, because each takes memory immediately


class SharedOptions(TypedDict, total=False):
    """The options of requests besides prompt and parameters. `arrival_time` is in seconds of
    `time.monotonic()`; None: now. A lower `priority` is more urgent. Only requests with the same
    `cache_salt` share cached prefixes; one salt per tenant prevents probing of others' prompts."""

    arrival_time: float | None
    priority: int
    cache_salt: str | None


class RequestOptions(SharedOptions, total=False):
    """The options of one request. `adapter` is the name of a loaded LoRA adapter."""

    adapter: str | None


class DrawnSeedParams(SamplingParams):
    """Parameters of a request without a seed, for which the engine drew one. Tokens that depend on
    such a seed can differ with and without speculation."""

    __slots__ = ()


@dataclass(slots=True)
class InputProcessor:
    """Makes requests. Prompt ids are below `num_embeddings`, sampled ids below `vocab_size`."""

    tokenizer: Tokenizer | None
    num_embeddings: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    seed: int
    num_seeds_drawn: int = 0

    def make_group(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        arrival_time: float | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,  # the digest of its content
    ) -> RequestGroup:
        """Return a group with its `n` requests. Raises `ValueError` that names the field, its value
        and the allowed values."""
        rules = self._check_params(params)
        arrival_time = time.monotonic() if arrival_time is None else arrival_time
        is_time = isinstance(arrival_time, Real) and abs(arrival_time) < math.inf
        require(is_time, "arrival_time", arrival_time, "a number of seconds")
        check_integers(priority=priority)
        is_salt = cache_salt is None or (isinstance(cache_salt, str) and cache_salt != "")
        require(is_salt, "cache_salt", cache_salt, "None or a non-empty str")
        text = prompt if isinstance(prompt, str) else None
        token_ids = _truncated(self._to_token_ids(prompt), params, self.max_model_len)
        group = RequestGroup(request_id, text, token_ids, arrival_time)
        keys = {"salt": cache_salt, "lora": adapter}
        extra_keys = tuple((name, key) for name, key in keys.items() if key is not None)
        features: dict[str, Any] = {} if adapter is None else {"adapter": adapter}
        if rules is not None:
            features["token_rules"] = rules
        min_tokens = params.min_tokens
        if params.max_tokens is None:  # a scheduler lowers it to fit max_model_len
            params = replace(params, max_tokens=self.max_model_len)
        if params.grammar is not None:
            features["grammar"] = self._grammar_source(params)
            features["min_tokens"] = min_tokens  # for its masks: a complete text can end before
            params = replace(params, grammar=None, min_tokens=0)
        skips = params.skip_reading_prefix_cache
        if (num_top := params.prompt_logprobs) is not None:
            check_integers(-1, prompt_logprobs=num_top)
            few = "None or True if prompt_logprobs is set"
            require(skips is not False, "skip_reading_prefix_cache", skips, few)
            group.prompt_logprobs = [None]
        seed = params.seed
        if seed is None:  # drawn from the engine's seed and the order of arrival
            seed = (self.seed << 32) + self.num_seeds_drawn * 1_000_003
            params = DrawnSeedParams(**{f.name: getattr(params, f.name) for f in fields(params)})
        for i in range(params.n):
            sample_features = dict(features)
            if num_top is not None and i == 0:  # one sample computes them for all
                sample_features["prompt_logprobs"] = int(num_top)
            request = KeyedRequest(
                request_id if params.n == 1 else f"{request_id}#{i}",
                token_ids,
                replace(
                    params,
                    seed=seed_of_sample(seed, i),
                    skip_reading_prefix_cache=bool(skips or "prompt_logprobs" in sample_features),
                ),
                self.eos_token_ids,
                arrival_time,
                priority,
                sample_features,
                extra_keys=extra_keys,
            )
            group.add(OutputProcessor(request, i, self.tokenizer, group.metrics, min_tokens))
        return group

    def _grammar_source(self, params: SamplingParams) -> str:
        from grammars import check_params, source_of

        if find_spec("llguidance") is None:
            raise ValueError("grammar needs llguidance; pip install 'vllm-from-scratch[grammar]'")
        if self.tokenizer is None:
            raise ValueError("grammar must be None for an engine without a tokenizer")
        check_params(params, [i for i in self.eos_token_ids if i < self.vocab_size])
        return source_of(params.grammar)

    def _check_params(self, params: SamplingParams) -> dict[str, Any] | None:
        """Check the parameters. Returns the rules for its tokens, if any."""
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params must be a SamplingParams, got {params!r}")
        require(params.n <= MAX_SAMPLES, "n", params.n, f"at most {MAX_SAMPLES:,}")
        self._check_token_ids("stop_token_ids", params.stop_token_ids)
        rules = None
        if any(getattr(params, name) is not None for name in TOKEN_RULE_FIELDS):
            from common.requests.token_rules import token_rules_of

            check_ids = partial(self._check_token_ids, limit=self.vocab_size)
            rules = token_rules_of(params, self.tokenizer, self.vocab_size, check_ids)
        if params.min_tokens > 0:
            forbidden = {*params.stop_token_ids, *(() if params.ignore_eos else self.eos_token_ids)}
            allowed = None if rules is None else rules["allowed"]
            if forbidden.issuperset(allowed or range(self.vocab_size)):
                raise ValueError(
                    f"min_tokens must be 0 if every token is a stop token, got {params.min_tokens}"
                )
        return rules

    def _to_token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("prompt must be token ids, got text: the engine has no tokenizer")
            if lone := [c for c in prompt if "\ud800" <= c <= "\udfff"]:
                raise ValueError(f"prompt contains {lone[0]!r}, an unpaired surrogate")
            token_ids = self.tokenizer.encode(prompt)
        else:
            token_ids = plain(prompt)
        if not isinstance(token_ids, Sequence) or isinstance(token_ids, bytes | bytearray):
            raise ValueError(f"prompt must be a str or token ids, got {type(prompt).__name__}")
        if not token_ids:
            raise ValueError(f"prompt must have at least one token, got {prompt!r}")
        return self._check_token_ids("prompt", token_ids)

    def _check_token_ids(
        self, name: str, token_ids: Sequence[int], limit: int | None = None
    ) -> list[int]:
        """Return the ids as `int`s, because NumPy's overflow and do not serialise. Checks in bulk,
        because a prompt can have 100,000 tokens; only an invalid prompt is checked one by one."""
        limit = limit or self.num_embeddings
        if all(map(_is_integer_type, set(map(type, token_ids)))):
            ids = list(map(int, token_ids))
            if not ids or (min(ids) >= 0 and max(ids) < limit):
                return ids
        wrong = [t for t in token_ids if not _is_integer_type(type(t)) or not 0 <= t < limit]
        raise ValueError(f"{name} must be token ids from 0 to {limit - 1}, got {wrong[0]!r}")


def _truncated(token_ids: list[int], params: SamplingParams, max_model_len: int) -> list[int]:
    """The last `truncate_prompt_tokens` tokens of a prompt. -1: as many as leave space for
    `max_tokens` outputs, or for one output if that is None."""
    num_kept = params.truncate_prompt_tokens
    if num_kept is None:
        return token_ids
    is_right = _is_integer_type(type(num_kept)) and (num_kept == -1 or num_kept > 0)
    require(is_right, "truncate_prompt_tokens", num_kept, "None, -1 or an integer >= 1")
    if num_kept == -1:
        num_kept = max_model_len - (params.max_tokens or 1)
        room = f"< max_model_len={max_model_len} if truncate_prompt_tokens is -1, or None"
        require(num_kept >= 1, "max_tokens", params.max_tokens, room)
    return token_ids[-num_kept:]


def plain(values: Any) -> Any:
    """Return arrays and tensors as lists of Python numbers, and anything else unchanged."""
    return values.tolist() if hasattr(values, "tolist") else values


def _is_integer_type(kind: type) -> bool:
    return issubclass(kind, Integral) and kind is not bool


def seed_of_sample(seed: int, index: int) -> int:
    """Return a sample's seed, a signed 64-bit integer. Sample 0 keeps the seed. The others hash it:
    if they counted up, the second sample of seed 42 would be the text of seed 43, as in vLLM."""
    if index == 0:
        return (seed + 2**63) % 2**64 - 2**63
    digest = blake2b(f"{seed} {index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
