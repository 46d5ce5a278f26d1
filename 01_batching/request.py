"""A request, its sampling parameters, and the two counters that everything follows from:

    num_tokens            token ids known so far: the prompt, then one more for every sampled token
    num_computed_tokens   positions whose keys and values are in the KV cache, or will be when the
                          scheduled step has finished

            prompt_token_ids            output_token_ids
        +----------------------------+---------------------+
        | 0 .......... computed      |                     |  num_tokens
        +----------------------------+---------------------+
                       ^ num_computed_tokens

A step computes some of the positions between the two; there is no "prefill" or "decode" state. A
loop that plans a step before it has read the last step's tokens counts those as well, in
`num_output_placeholders`; in any other loop that is 0.

Invariants: `0 <= num_computed_tokens <= num_tokens + num_output_placeholders`; `all_token_ids` is
the prompt followed by the outputs; a finished request never changes again. (vLLM V1 has the same
two counters. SGLang keeps extend and decode batches apart, nano-vllm distinguishes the phases by an
argument.)

See 01_batching/README.md#a-request"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from numbers import Integral, Real
from typing import Any, TypeGuard

# What each number of `SamplingParams` may be, its lowest and its highest value. A lowest value that
# is an `int` means integers.
_RANGES = {
    "n": ("an integer >= 1", 1, math.inf),
    "top_k": ("an integer >= 0", 0, math.inf),
    "max_tokens": ("an integer >= 1", 1, math.inf),
    "min_tokens": ("an integer >= 0", 0, math.inf),
    "logprobs": ("an integer >= -1", -1, math.inf),
    "seed": ("a signed 64-bit integer", -(2**63), 2**63 - 1),
    "temperature": ("a finite number in [0.0, inf)", 0.0, sys.float_info.max),
    "top_p": ("a finite number in (0.0, 1.0]", math.ulp(0.0), 1.0),
    "min_p": ("a finite number in [0.0, 1.0]", 0.0, 1.0),
    # Dividing logits by less gives infinity.
    "repetition_penalty": ("a finite number in [1e-6, 1e6]", 1e-6, 1e6),
    "presence_penalty": ("a finite number in [-2.0, 2.0]", -2.0, 2.0),
    "frequency_penalty": ("a finite number in [-2.0, 2.0]", -2.0, 2.0),
}
_MAY_BE_NONE = ("max_tokens", "logprobs", "seed")
_SWITCHES = ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "detokenize")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are sampled and when to stop.

    Order of application: `allowed_token_ids`, `bad_words`, `min_tokens`, `logit_bias`, penalties,
    temperature, min-p, top-k, top-p; raw log-probabilities come before all. `temperature=0` is
    greedy and ignores what follows it. `top_k=0` keeps all tokens, and so does -1, as in vLLM.
    `seed` makes every random choice a function of the request alone, and so the output in float64;
    in bfloat16 a batch rounds differently than a request alone. Requests with equal seeds draw the
    same noise, whatever their prompts, so give each prompt a different seed; -1 means none, as in
    vLLM. Of `n` samples, the first one has the seed itself. `max_tokens=None` means as many as fit.
    `stop` strings are cut from the text; `stop_token_ids` end the output as EOS does.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16  # None: as many as fit (the engine sets a number)
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True
    logit_bias: Mapping[int, float] | None = None  # from here on: checked where it is used
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[Any] | None = None  # texts, or sequences of token ids
    include_stop_str_in_output: bool = False
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    detokenize: bool = True
    skip_reading_prefix_cache: bool | None = None  # chapter 3
    grammar: Any = None  # chapter 4
    structured_outputs: Any = None  # vLLM's name for `grammar`, which gets the value

    def __post_init__(self) -> None:
        set_field = partial(object.__setattr__, self)  # the dataclass is frozen
        if isinstance(self.stop, str):
            set_field("stop", (self.stop,))
        if self.structured_outputs is not None:
            other = "None if grammar is set (both name the same thing)"
            require(self.grammar is None, "structured_outputs", self.structured_outputs, other)
            set_field("grammar", self.structured_outputs)
            set_field("structured_outputs", None)
        if self.top_k == -1:
            set_field("top_k", 0)
        if self.seed == -1:
            set_field("seed", None)
        for name in ("stop", "stop_token_ids"):
            values = () if getattr(self, name) is None else getattr(self, name)
            require(isinstance(values, Iterable), name, values, "a sequence")
            set_field(name, tuple(values))
        are_texts = all(isinstance(text, str) and text for text in self.stop)
        require(are_texts, "stop", self.stop, "non-empty strings")
        are_ids = all(_is_integer(token) and token >= 0 for token in self.stop_token_ids)
        require(are_ids, "stop_token_ids", self.stop_token_ids, "integers >= 0")
        set_field("stop_token_ids", tuple(map(int, self.stop_token_ids)))
        for name, (allowed, low, high) in _RANGES.items():
            if name in _MAY_BE_NONE and getattr(self, name) is None:
                continue
            value = getattr(self, name)
            kind = type(low)
            is_right = _is_integer(value) if kind is int else _is_number(value)
            require(is_right and low <= kind(value) <= high, name, value, allowed)
            set_field(name, kind(value))  # NumPy's integers overflow
        for name in _SWITCHES:
            value = getattr(self, name)
            require(isinstance(value, bool), name, value, "True or False")
        skips = self.skip_reading_prefix_cache
        is_right = skips is None or isinstance(skips, bool)
        require(is_right, "skip_reading_prefix_cache", skips, "None, True or False")
        limit = self.max_tokens
        is_right = limit is None or self.min_tokens <= limit
        require(is_right, "min_tokens", self.min_tokens, f"<= max_tokens ({limit})")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


def require(is_allowed: bool, name: str, value: object, allowed: str) -> None:
    """Raise `ValueError` that names the field, its value and what is allowed, unless
    `is_allowed`."""
    if not is_allowed:
        raise ValueError(f"{name} must be {allowed}, got {value!r}")


def check_integers(lowest: int | None = None, **fields: object) -> None:
    """Raise `ValueError` for a field that is not an integer, or below `lowest`."""
    allowed = "an integer" if lowest is None else f"an integer >= {lowest}"
    for name, value in fields.items():
        is_right = _is_integer(value) and (lowest is None or value >= lowest)
        require(is_right, name, value, allowed)


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    try:
        return (
            isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(float(value))
        )
    except OverflowError:  # of an integer
        return False


class RequestStatus(IntEnum):
    """The state of a request, in order: `FINISHED_STOPPED` and later ones are finished."""

    WAITING = 0
    WAITING_FOR_REMOTE_KVS = 1  # chapter 3: its KV is being loaded from outside
    WAITING_FOR_GRAMMAR = 2  # chapter 4: its grammar is being compiled
    RUNNING = 3
    PREEMPTED = 4  # chapter 4
    FINISHED_STOPPED = 5
    FINISHED_LENGTH_CAPPED = 6
    FINISHED_ABORTED = 7
    FINISHED_ERROR = 8


FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_ERROR: "error",
}


class Request:
    """One sequence to be continued, as the scheduler sees it. `priority` (chapter 4): a lower
    number is more urgent. `features`: plain data for the runner's plugins, by the plugin's name.
    Times are seconds of `time.monotonic()`."""

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams,
        eos_token_ids: Iterable[int] = (),
        arrival_time: float | None = None,
        priority: int = 0,
        features: dict[str, Any] | None = None,
    ) -> None:
        allowed = "a SamplingParams; Request.from_tokens(id, token_ids, n) makes a greedy request"
        is_right = isinstance(sampling_params, SamplingParams)
        require(is_right, "sampling_params", sampling_params, allowed)
        if sampling_params.max_tokens is None:
            raise ValueError("max_tokens must be an integer, got None; an engine sets a default")
        if not prompt_token_ids:
            raise ValueError(f"request {request_id!r}: prompt_token_ids must not be empty")
        self.request_id = request_id
        self.prompt_token_ids = list(prompt_token_ids)
        self.sampling_params = sampling_params
        self.arrival_time = time.monotonic() if arrival_time is None else arrival_time
        self.priority = priority
        self.features = {} if features is None else features
        # A scheduler lowers it if a limit ends the output sooner, and names that in `length_limit`.
        self.max_tokens = sampling_params.max_tokens
        self.output_token_ids: list[int] = []
        self.all_token_ids = list(prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_output_placeholders = 0  # to be sampled by steps in flight; not known here yet
        self.num_cached_tokens = 0  # chapter 3: computed tokens that were found in a cache
        self.num_preemptions = 0  # chapter 4
        self.has_bad_kv = False  # chapter 3: its logits were NaN, so its KV must not be shared
        self.status = RequestStatus.WAITING
        self.stop_reason: int | str | None = None
        self.length_limit: str | None = None
        eos_ids = () if sampling_params.ignore_eos else eos_token_ids
        self.end_ids = frozenset((*sampling_params.stop_token_ids, *eos_ids))

    @classmethod
    def from_tokens(
        cls,
        request_id: str,
        token_ids: Sequence[int],
        max_new_tokens: int = 16,
        priority: int = 0,
        arrival_time: float | None = None,
    ) -> Request:
        """A greedy request that stops only by its length: for tests and notebooks."""
        params = SamplingParams(temperature=0, max_tokens=max_new_tokens, ignore_eos=True)
        return cls(request_id, token_ids, params, arrival_time=arrival_time, priority=priority)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def max_num_tokens(self) -> int:
        """Tokens that the request can ever have. The last one is never fed back, so it needs no KV
        slot."""
        return self.num_prompt_tokens + self.max_tokens

    @property
    def is_finished(self) -> bool:
        return self.status >= RequestStatus.FINISHED_STOPPED

    @property
    def finish_reason(self) -> str | None:
        """`"stop"`, `"length"`, `"abort"`, `"error"`, or None while unfinished."""
        return FINISH_REASONS.get(self.status)

    def append_output_token(self, token_id: int) -> None:
        """Append one sampled token, and finish if it is a stop token or the last one allowed."""
        assert self.status < RequestStatus.FINISHED_STOPPED, f"{self.request_id} has finished"
        self.output_token_ids.append(token_id)
        self.all_token_ids.append(token_id)
        num_outputs = len(self.output_token_ids)
        if token_id in self.end_ids and num_outputs >= self.sampling_params.min_tokens:
            self.status = RequestStatus.FINISHED_STOPPED
            # As in vLLM: EOS is the normal end and gives no reason; a stop token gives its id.
            is_stop_token = token_id in self.sampling_params.stop_token_ids
            self.stop_reason = token_id if is_stop_token else None
        elif num_outputs == self.max_tokens:
            self.status = RequestStatus.FINISHED_LENGTH_CAPPED

    def check_invariants(self) -> None:
        num_known = self.num_tokens + self.num_output_placeholders
        assert 0 <= self.num_computed_tokens <= num_known, self
        assert self.all_token_ids == self.prompt_token_ids + self.output_token_ids, self
        assert self.num_output_tokens <= self.max_tokens, self

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, prompt={self.num_prompt_tokens}, "
            f"outputs={self.num_output_tokens}, computed={self.num_computed_tokens})"
        )
