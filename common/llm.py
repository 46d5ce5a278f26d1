"""`LLM`: the engine behind one call.

    from common.llm import LLM, SamplingParams

    llm = LLM()  # the checkpoint that ships with the repository
    outputs = llm.generate(["def fibonacci(n):"], SamplingParams(temperature=0, max_tokens=64))
    print(outputs[0].outputs[0].text)

Importing this module is cheap: torch and transformers are loaded by `LLM(...)`, not before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from request import CompletionOutput, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from common.engine import LLMEngine

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams"]


class LLM:
    """A model, ready to generate.

    `model` is a directory in Hugging Face format, a hub id, or None for the shipped checkpoint. All
    other arguments are the fields of `common.engine_config.EngineConfig`, where they are explained.
    Raises `ValueError` for arguments that make no sense and `FileNotFoundError` for a model that is
    not there."""

    def __init__(self, model: str | Path | None = None, **config: Any) -> None:
        from common.engine import LLMEngine
        from common.engine_config import EngineConfig

        known = set(EngineConfig.__dataclass_fields__)
        if unknown := sorted(set(config) - known):
            raise ValueError(f"unknown argument {unknown[0]!r}: LLM takes {sorted(known)}")
        self.engine: LLMEngine = LLMEngine(EngineConfig(model=model, **config))
        self._num_requests = 0
        self._outputs: dict[str, RequestOutput | None] = {}  # of the calls that are under way

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str | Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt: text, token ids, or a list of either. Outputs are in the order
        given.

        `sampling_params` is one for all or one for each. Only prompts with an equal `cache_salt`
        share cached prefixes. Raises `ValueError` if any prompt can not
        be served; nothing is generated then. Interrupting the call aborts its requests."""
        from tqdm import tqdm

        from common.request_group import spread_params

        prompts = as_list_of_prompts(prompts)
        ids = self._submit(prompts, spread_params(sampling_params, len(prompts)), cache_salt)
        own = set(ids)
        try:
            with tqdm(total=len(ids), desc="Requests", unit="req", disable=not use_tqdm) as bar:
                num_open = len(ids)
                while num_open:
                    num_finished = len(own.intersection(self._step()))
                    num_open -= num_finished
                    bar.update(num_finished)
            return [self._outputs[i] for i in ids]
        finally:
            self._withdraw(ids)

    def stream(
        self, prompt: str | Sequence[int], sampling_params: SamplingParams | None = None
    ) -> Iterator[str]:
        """Yield the continuation piece by piece. Joined, the pieces are `generate`'s text.

        A piece is never taken back: incomplete characters and what may become a stop string are
        held until they are decided. Leaving the loop early aborts the request."""
        params = sampling_params or SamplingParams()
        if params.n != 1:
            raise ValueError(f"n is {params.n}: a stream has one continuation; use generate")
        (request_id,) = self._submit([prompt], [params])
        num_sent = 0
        try:
            while True:
                output = self._outputs[request_id]
                if output is not None and output.finished:
                    if rest := output.outputs[0].text[num_sent:]:
                        yield rest
                    return
                if delta := self.engine.take_delta(request_id):
                    num_sent += len(delta)
                    yield delta
                self._step()
        finally:
            self._withdraw([request_id])

    def close(self) -> None:
        """Abort what is unfinished, and stop what `kv_tiers` or `kv_connector` started."""
        self.engine.close()

    def _submit(
        self, prompts: list, params: list[SamplingParams], cache_salt: str | None = None
    ) -> list[str]:
        first = self._num_requests
        ids = [f"request-{first + i}" for i in range(len(prompts))]
        self.engine.add_requests(zip(ids, prompts, params, strict=True), cache_salt=cache_salt)
        self._num_requests += len(prompts)
        self._outputs.update(dict.fromkeys(ids))
        return ids

    def _step(self) -> list[str]:
        """One step for all calls under way: each finds its requests' outputs in `_outputs`.

        Returns the ids of the requests that have finished.
        """
        outputs = self.engine.step()
        for output in outputs:
            if output.request_id in self._outputs:
                self._outputs[output.request_id] = output
        return [output.request_id for output in outputs if output.finished]

    def _withdraw(self, ids: list[str]) -> None:
        for request_id in ids:
            self.engine.abort_request(request_id)
            del self._outputs[request_id]


def as_list_of_prompts(prompts: Any) -> list:
    """A single prompt, text or token ids, becomes a list of one. Raises `ValueError` for what is
    neither a prompt nor a row of them."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes | Mapping | Set):
        raise ValueError(
            f"prompts is a {type(prompts).__name__}: it must be a str, token ids or a list of them"
        )
    prompts = list(prompts)
    if prompts and all(isinstance(p, int) and not isinstance(p, bool) for p in prompts):
        return [prompts]
    return prompts
