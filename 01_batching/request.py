"""A request and what its user asked for.

Everything a serving engine does to a request follows from two counters:

    num_tokens            token ids known so far: the prompt, then one more for every sampled token
    num_computed_tokens   positions whose keys and values are in the KV cache, or will be when the
                          step that is planned is over

            prompt_token_ids            output_token_ids
        +----------------------------+---------------------+
        | 0 .......... computed      |                     |  num_tokens
        +----------------------------+---------------------+
                       ^ num_computed_tokens

A step computes some of the positions between the two. There is no "prefill" or "decode" state: a
request that is five tokens behind is what prose calls a prefill, one that is a single token behind
is a decode. A freshly sampled token is known before its keys and values are written, so a running
request is always at least one behind.

Invariants: `0 <= num_computed_tokens <= num_tokens`; `all_token_ids` is the prompt followed by the
outputs; a finished request never changes again.

vLLM keeps the same two counters in its V1 engine. SGLang keeps `fill_ids` and `extend_input_len`
and separates extend from decode batches; nano-vllm tells the phases apart by an argument of its
runner."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from numbers import Integral, Real
from typing import TypeGuard

from post_names import RequestPostNames


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop. Order of application: penalties, temperature, min-p,
    top-k, top-p.

    `temperature=0` is greedy and ignores what follows it. `top_k=0` keeps all tokens, and so does
    -1, as in vLLM. `seed` makes every random choice a function of the request alone, and so the
    output in float64; in bfloat16 a batch rounds differently than a request alone. `stop` strings
    are cut from the text; `stop_token_ids` end the output as EOS does. Raises `ValueError` that
    names the field, its value and what is allowed."""

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        for name, values in (("stop", stop), ("stop_token_ids", self.stop_token_ids)):
            if values is not None and not isinstance(values, Iterable):
                raise ValueError(f"{name} is {values!r}: it must be a sequence")
            object.__setattr__(self, name, () if values is None else tuple(values))
        if _is_integer(self.top_k) and self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        self._check_integers()
        self._check_numbers()
        if not all(isinstance(s, str) and s for s in self.stop):
            raise ValueError(f"stop is {self.stop!r}: each stop string must be a non-empty str")
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}: it must be True or False")

    def _check_integers(self) -> None:
        lowest = {"n": 1, "top_k": 0, "max_tokens": 1, "min_tokens": 0, "logprobs": 0, "seed": None}
        for name, low in lowest.items():
            if name in ("seed", "logprobs") and getattr(self, name) is None:
                continue
            value = getattr(self, name)
            check_integers(low, **{name: value})
            object.__setattr__(self, name, int(value))  # NumPy's integers overflow
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed!r}: it must fit in 64 bits, signed")
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens is {self.min_tokens}: "
                f"it must be <= max_tokens, which is {self.max_tokens}"
            )
        if not all(_is_integer(t) and t >= 0 for t in self.stop_token_ids):
            raise ValueError(
                f"stop_token_ids is {self.stop_token_ids!r}: ids must be integers >= 0"
            )
        object.__setattr__(self, "stop_token_ids", tuple(map(int, self.stop_token_ids)))

    def _check_numbers(self) -> None:
        allowed = {  # name: (lowest, lowest is allowed, highest)
            "temperature": (0.0, True, math.inf),
            "top_p": (0.0, False, 1.0),
            "min_p": (0.0, True, 1.0),
            "repetition_penalty": (0.0, False, math.inf),
            "presence_penalty": (-2.0, True, 2.0),
            "frequency_penalty": (-2.0, True, 2.0),
        }
        for name, (low, closed, high) in allowed.items():
            value = getattr(self, name)
            number = _to_float(value)
            is_allowed = math.isfinite(number) and low <= number <= high
            if not is_allowed or (number == low and not closed):
                interval = f"{'[' if closed else '('}{low}, {high}{']' if high < math.inf else ')'}"
                raise ValueError(f"{name} is {value!r}: it must be a finite number in {interval}")
            object.__setattr__(self, name, number)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


def check_integers(lowest: int | None = None, **fields: object) -> None:
    """Raises `ValueError` for a field that is not an integer, or below `lowest`."""
    for name, value in fields.items():
        if not _is_integer(value) or (lowest is not None and value < lowest):
            allowed = "an integer" if lowest is None else f"an integer >= {lowest}"
            raise ValueError(f"{name} is {value!r}: it must be {allowed}")


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _to_float(value: object) -> float:
    """NaN if it is no real number, infinity if it is an integer too large for a float."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


class RequestStatus(IntEnum):
    """Ordered: everything from `FINISHED_STOPPED` on is finished."""

    WAITING = 0
    WAITING_FOR_REMOTE_KVS = 1  # chapter 3: its KV comes from outside
    RUNNING = 2
    PREEMPTED = 3  # chapter 4
    FINISHED_STOPPED = 4
    FINISHED_LENGTH_CAPPED = 5
    FINISHED_ABORTED = 6
    FINISHED_ERROR = 7


_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_ERROR: "error",
}


class Request(RequestPostNames):
    """One sequence to be continued, as the scheduler sees it.

    `priority` (chapter 4): a lower number is more urgent. Times are seconds of
    `time.monotonic()`. Raises `ValueError` that names the argument."""

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams,
        eos_token_ids: Iterable[int] = (),
        arrival_time: float | None = None,
        priority: int = 0,
    ) -> None:
        if not isinstance(sampling_params, SamplingParams):
            raise ValueError(
                f"sampling_params is {sampling_params!r}: it must be a SamplingParams; "
                "Request.from_tokens(request_id, token_ids, max_new_tokens) makes a greedy request"
            )
        if not prompt_token_ids:
            raise ValueError(
                f"request {request_id!r}: prompt_token_ids is empty: "
                "it must hold at least one token"
            )
        self.request_id = request_id
        self.prompt_token_ids = list(prompt_token_ids)
        self.sampling_params = sampling_params
        self.arrival_time = time.monotonic() if arrival_time is None else arrival_time
        self.priority = priority
        # A scheduler lowers it where the model ends sooner, and says so in `length_limit`.
        self.max_tokens = sampling_params.max_tokens

        self.output_token_ids: list[int] = []
        self.all_token_ids: list[int] = list(prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0  # chapter 3: of them, those that were found in a cache
        self.num_preemptions = 0  # chapter 4
        self.status = RequestStatus.WAITING
        self.stop_reason: int | str | None = None
        self.length_limit: str | None = None

        self._stop_ids = frozenset(sampling_params.stop_token_ids)
        eos_ids = frozenset() if sampling_params.ignore_eos else frozenset(eos_token_ids)
        self._end_ids = self._stop_ids | eos_ids

    @classmethod
    def from_tokens(
        cls,
        request_id: str,
        token_ids: Sequence[int],
        max_new_tokens: int = 16,
        priority: int = 0,
        arrival_time: float | None = None,
    ) -> Request:
        """A greedy request that nothing but its length stops: for tests and notebooks."""
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
        """Tokens it can ever hold. The last of them is never fed back, so it needs no KV slot."""
        return self.num_prompt_tokens + self.max_tokens

    @property
    def is_finished(self) -> bool:
        return self.status >= RequestStatus.FINISHED_STOPPED

    @property
    def finish_reason(self) -> str | None:
        """`"stop"`, `"length"`, `"abort"`, `"error"`, or None while unfinished."""
        return _FINISH_REASONS.get(self.status)

    def append_output_token(self, token_id: int) -> None:
        """Take one sampled token, and finish if it is a stop token or the last one allowed."""
        assert self.status < RequestStatus.FINISHED_STOPPED, f"{self.request_id} is finished"
        self.output_token_ids.append(token_id)
        self.all_token_ids.append(token_id)
        num_outputs = len(self.output_token_ids)
        if token_id in self._end_ids and num_outputs >= self.sampling_params.min_tokens:
            self.status = RequestStatus.FINISHED_STOPPED
            # As in vLLM: EOS is the ordinary end and gives no reason; a stop token names itself.
            self.stop_reason = token_id if token_id in self._stop_ids else None
        elif num_outputs == self.max_tokens:
            self.status = RequestStatus.FINISHED_LENGTH_CAPPED

    def check_invariants(self) -> None:
        shown, max_tokens = repr(self), self.max_tokens
        assert 0 <= self.num_computed_tokens <= self.num_tokens, shown
        assert self.all_token_ids == self.prompt_token_ids + self.output_token_ids, shown
        assert self.num_output_tokens <= max_tokens <= self.sampling_params.max_tokens, shown

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, prompt={self.num_prompt_tokens}, "
            f"outputs={self.num_output_tokens}, computed={self.num_computed_tokens})"
        )
