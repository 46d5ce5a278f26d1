"""`LLM`: the engine as one class with `generate` and `stream`.

    from common.llm import LLM, SamplingParams

    llm = LLM()  # the checkpoint that ships with the repository
    outputs = llm.generate(["def fibonacci(n):"], SamplingParams(temperature=0, max_tokens=64))
    print(outputs[0].outputs[0].text)

Importing this module is cheap, because only `LLM(...)` loads torch and transformers.

See common/README.md"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from numbers import Number
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.requests.output_processor import CompletionOutput, RequestOutput
from request import SamplingParams

if TYPE_CHECKING:
    from typing import Unpack

    from common.engine import LLMEngine
    from common.requests.input_processor import RequestOptions, SharedOptions

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams"]


class LLM:
    """A loaded model that generates text.

    `model` is a directory in Hugging Face format, a hub id, or None for the shipped checkpoint. All
    other arguments are the fields of `common.engine_config.EngineConfig`, where they are explained.
    Raises `ValueError` for invalid arguments and `FileNotFoundError` for a missing model.

    It belongs to the thread and process that made it: another one gets a `RuntimeError`, except in
    `close`, which works from any thread. `AsyncLLM` takes requests from everywhere."""

    def __init__(self, model: str | Path | None = None, **config: Any) -> None:
        from common.engine import LLMEngine
        from common.engine_config import EngineConfig

        known = EngineConfig.__dataclass_fields__
        if unknown := config.keys() - known.keys():
            raise ValueError(f"arguments of LLM must be among {sorted(known)}, got {unknown}")
        if "TORCHELASTIC_RUN_ID" in os.environ:  # started by torchrun: as many ranks as it starts
            from common.parallel.remote_launch import torchrun_size

            size = torchrun_size(config.get("pipeline_parallel_size", 1))
            if config.setdefault("tensor_parallel_size", size) != size:
                given = config["tensor_parallel_size"]
                raise ValueError(
                    f"tensor_parallel_size must be {size}, so that all processes of torchrun have "
                    f"a rank, got {given!r}"
                )
        self.engine: LLMEngine = LLMEngine(EngineConfig(model=model, **config))

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str | Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        adapter: str | Sequence[str | None] | None = None,
        **options: Unpack[SharedOptions],
    ) -> list[RequestOutput]:
        """Generate a continuation of each prompt: text, token ids (a list or an array), or a list
        of either. Outputs are in the order of the prompts.

        `sampling_params` is one for all prompts or a list with one for each; None:
        `get_default_sampling_params()`. So is `adapter`, the name of a LoRA adapter.
        `SharedOptions` (`priority`, `cache_salt`, `arrival_time`) apply to all. Raises
        `ValueError`, and generates nothing, if any prompt cannot be served. Interrupting the call
        aborts its requests."""
        from tqdm import tqdm

        prompts = as_list_of_prompts(prompts)
        with tqdm(total=len(prompts), desc="Requests", unit="req", disable=not use_tqdm) as bar:
            outputs = self.engine.generate_batch(
                prompts, sampling_params, bar.update, adapter, **options
            )
        return list(outputs.values())

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        adapter: str | Sequence[str | None] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[SharedOptions],
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of a list of conversations: messages with "role" and
        "content", rendered by the model's chat template or by `chat_template`, a Jinja text.

        The output is the model's text: only the server parses reasoning and tool calls. Other
        arguments are those of `generate`. Raises `ValueError` if there is no template or it cannot
        render the messages."""
        tokenizer = self.engine.tokenizer
        if tokenizer is None or tokenizer.source is None:
            raise ValueError("cannot chat: the model has no tokenizer with templates")
        source = tokenizer.source
        if chat_template is None and source.chat_template is None:
            raise ValueError(
                "chat_template must be given, such as the text of "
                "common/serve/chat_template.jinja: the model has none"
            )
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = []
        for conversation in conversations:
            try:
                text = source.apply_chat_template(
                    conversation,
                    tools=tools,
                    chat_template=chat_template,
                    add_generation_prompt=add_generation_prompt and not continue_final_message,
                    continue_final_message=continue_final_message,
                    tokenize=False,
                    **chat_template_kwargs or {},
                )
            except Exception as error:  # a template is a program that can raise its own errors
                raise ValueError(f"messages cannot be rendered: {error}") from error
            # The template wrote the special tokens: they are not added again.
            prompts.append(tokenizer.encode(text, add_special_tokens=False))
        return self.generate(prompts, sampling_params, use_tqdm, adapter, **options)

    def stream(
        self,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> Iterator[str]:
        """Yield the continuation in text deltas. Joined, the deltas are `generate`'s text.

        A delta is final: incomplete characters, and text that could become a stop string, are held
        back until more tokens settle them. If the request is aborted, the stream ends with the text
        so far. Leaving the loop early aborts the request."""
        if isinstance(sampling_params, SamplingParams) and sampling_params.n != 1:
            raise ValueError(f"n must be 1 for a stream, got {sampling_params.n}; use generate")
        yield from self.engine.stream(prompt, sampling_params, **options)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of requests that have none: what the model's generation_config.json
        recommends. Raises `ValueError` if it recommends something invalid."""
        return self.engine.default_sampling_params

    def load_adapter(self, name: str, directory: str | Path) -> None:
        """Call `LLMEngine.load_adapter`."""
        self.engine.load_adapter(name, directory)

    def unload_adapter(self, name: str) -> None:
        """Call `LLMEngine.unload_adapter`."""
        self.engine.unload_adapter(name)

    def close(self) -> None:
        """Abort unfinished requests, stop the threads of `kv_tiers` and `kv_connector`, and end the
        workers, if there are several ranks. Dropping the last reference does the same."""
        self.engine.close()


def as_list_of_prompts(prompts: Any) -> list:
    """Return `prompts` as a list. A single prompt, text or token ids, becomes a list of one. A
    one-dimensional array is one prompt, a two-dimensional one is a list of prompts. Raises
    `ValueError` for anything else."""
    from common.requests.input_processor import plain

    if isinstance(prompts, str):
        return [prompts]
    prompts = plain(prompts)
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes | Mapping | Set):
        raise ValueError(
            f"prompts must be a str, token ids or a list of them, got {type(prompts).__name__}"
        )
    prompts = list(prompts)
    if prompts and isinstance(prompts[0], Number):
        return [prompts]  # the engine checks that the numbers are token ids
    return prompts
