"""Request bodies: OpenAI's fields with vLLM's additions, and their conversion for the engine.

Numbers may be strings, as in vLLM; `null` means that the field is absent. `SamplingParams` and the
engine validate the values. Unknown fields are ignored, as in vLLM. For
each field that would change an answer and that this server has not, `NOT_BUILT` says which values
change nothing; the others are rejected by name.

See common/serve/README.md#what-it-answers"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
)

from common.requests.input_processor import RequestOptions
from common.sampling.sampling_rules import SAMPLING_RULES
from common.serve.errors import ApiError, api_error, bad
from common.serve.tool_calls import ToolUse
from grammars import Json
from request import SamplingParams

MAX_N = 128  # sequences of a prompt, and prompts of a request, as at OpenAI
MAX_PROMPTS = 2048
MAX_LOGPROBS = 20  # vLLM's `--max-logprobs`
MAX_ENTRIES = 500_000  # log-probabilities in one answer
MAX_TEXT = 64 << 10  # bytes of all `bad_words`, and of all `stop` strings
# The fields of OpenAI's and vLLM's requests that would change an answer and that this server does
# not have, each with the values that are accepted, because they change nothing.
NOT_BUILT: dict[str, tuple] = {
    "functions": ([],),
    "function_call": ("none",),
    "audio": (),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "prediction": (),
    "web_search_options": (),
    "moderation": (),
    "suffix": ("",),
    "best_of": (1,),
    "use_beam_search": (False,),
    "echo": (False,),  # in a chat
    "chat_template": (),  # a template is a program, so only the server's owner chooses it
    "prompt_embeds": (),
    "truncation_side": ("left",),
    "thinking_token_budget": (-1,),
    "logprob_token_ids": ([],),
    "repetition_detection": ({},),
    "watermarking": (False,),
    "vllm_xargs": ({},),  # for extensions of the sampler
    "return_token_offsets": (False,),
    "return_prompt_text": (False,),
    **dict.fromkeys(["guided_json", "guided_regex", "guided_choice", "guided_grammar"], ()),
}

# Report only the first fault of a list, because a body can have millions.
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]
Numbers = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
# The engine searches each token's text for each string: 100,000 cost all requests 70 ms per step.
Strings = Annotated[list[str], Field(fail_fast=True, max_length=1024)]
Messages = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
MAX_BIASES = 1024
MAX_NAME = 1024  # characters of a string that is compared or hashed


def _few(value: Any) -> Any:
    """Refuse a long dictionary before its entries are looked at."""
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise ValueError(f"must have at most {MAX_BIASES} entries")
    return value


class Body(BaseModel):
    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    @classmethod
    def parsed(cls, data: bytes) -> Body:
        """Return the body that a client sent as JSON. Raises `ApiError`."""
        try:
            return cls.model_validate(json.loads(data))
        except ValidationError as error:
            raise _wrong_body(error) from None
        except (ValueError, RecursionError) as error:
            raise bad(f"the body must be JSON: {error}") from None

    def check_extra(self) -> None:
        """Raise `ApiError` for a field that this server does not have and that is not harmless."""
        for name, value in (self.model_extra or {}).items():
            if value is not None and value not in NOT_BUILT.get(name, (value,)):
                raise bad(f"{name} is not supported by this server", name)

    def error(self, error: Exception) -> ApiError:
        """Return the error for the client that sent this body, with `param` as a field of it."""
        found = api_error(error, _FIELDS_OF.keys() | type(self).model_fields.keys())
        name = found.param
        for field in _FIELDS_OF.get(name or "", ()):
            if getattr(self, field, None) is not None:
                found.param = field
                is_part = name in ("schema", "choice")  # of the field
                rest = f": {found.message}" if is_part else found.message.removeprefix(str(name))
                found.message = field + rest
                break
        return found


# By the name with which an engine's message begins: the fields that it can mean.
_GRAMMARS = ("structured_outputs", "response_format", "tools")
_FIELDS_OF: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("grammar", "schema", "choice"), _GRAMMARS),
    "adapter": ("model",),
    "prompt": ("messages",),
    "max_tokens": ("max_completion_tokens",),
}


def _wrong_body(error: ValidationError) -> ApiError:
    """Return the error that names the wrong field."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(map(str, first["loc"]))
    return bad(f"{place or 'the body'}: {first['msg']}", str(first["loc"][0]) if place else None)


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ResponseFormat(Body):
    type: str
    json_schema: dict[str, Any] | None = None


class Function(Body):
    name: str = Field(max_length=256, pattern=r"^[\w.:/-]+$")
    parameters: dict[str, Any] | None = None  # a JSON schema


class Tool(Body):
    type: Literal["function"] = "function"
    function: Function


Tools = Annotated[list[Tool], Field(fail_fast=True)]
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


_NUMBERS: dict[str, Any] = {r.name: (type(r.default) | None, None) for r in SAMPLING_RULES}
RuleNumbers: type[Body] = create_model("RuleNumbers", __base__=Body, **_NUMBERS)


class GenerateBody(RuleNumbers):
    """The fields of completion and chat requests, with the names of `SamplingParams` if it has
    the field."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_N)
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | Strings | None = None
    stop_token_ids: Numbers | None = Field(None, max_length=MAX_BIASES)  # checked per sequence
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: Annotated[dict[int, float] | None, BeforeValidator(_few)] = None
    allowed_token_ids: Numbers | None = None
    bad_words: Strings | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    priority: int | None = None
    cache_salt: str | None = Field(None, max_length=MAX_NAME)
    request_id: str | None = Field(None, max_length=MAX_NAME)  # unless the header names another
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # in log-probabilities

    def options(self) -> RequestOptions:
        """Return the keyword arguments for `AsyncLLM.generate`."""
        return {"priority": self.priority or 0, "cache_salt": self.cache_salt}

    def sampling_params(self, defaults: dict[str, Any], **others: Any) -> SamplingParams:
        """Return the sampling parameters: `defaults` for absent fields, `others` for fields with
        other names. Raises `ApiError`."""
        self._check()
        names = SamplingParams.__dataclass_fields__.keys() & type(self).model_fields.keys()
        given = {name: getattr(self, name) for name in names}
        given |= {"grammar": self._grammar(), "structured_outputs": None} | others
        try:
            return SamplingParams(**defaults | {k: v for k, v in given.items() if v is not None})
        except ValueError as error:
            raise self.error(error) from error

    def _check(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise bad("stream_options must be null without stream", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise bad("prompt_logprobs must be null in a stream", "prompt_logprobs")
        for name, texts in ("bad_words", self.bad_words), ("stop", self.stop):
            texts = [texts] if isinstance(texts, str) else texts or ()
            if sum(len(text.encode(errors="replace")) for text in texts) > MAX_TEXT:
                raise bad(f"{name} must have at most {MAX_TEXT} bytes in all strings", name)
        self.check_extra()

    def within_entries(self, num_tokens: list[int], params: SamplingParams) -> SamplingParams:
        """Return `params` with `max_tokens` lowered, so that an answer has at most `MAX_ENTRIES`
        log-probabilities. `num_tokens` are the lengths of the prompts. Raises `ApiError` if those
        of the prompts alone are more."""
        in_prompts = params.n * _width(params.prompt_logprobs) * sum(num_tokens)
        if in_prompts >= MAX_ENTRIES:
            name = "echo" if self.prompt_logprobs is None else "prompt_logprobs"
            limit = f"less than {MAX_ENTRIES:,}, got {in_prompts:,}"
            raise bad(f"{name}: prompts x n x tokens x logprobs must be {limit}", name)
        width = params.n * len(num_tokens) * _width(params.logprobs)
        if width == 0:
            return params
        fits = max(1, (MAX_ENTRIES - in_prompts) // width)
        return replace(params, max_tokens=min(fits, params.max_tokens or fits))

    def _grammar(self) -> Any:
        form = self.response_format
        given = self.structured_outputs
        if form is None or form.type == "text":
            if given is None:
                return None  # vLLM's clients also send the options that they do not use
            return {name: value for name, value in given.items() if value not in (None, False)}
        if given is not None:
            raise bad("response_format must be null with structured_outputs", "response_format")
        if form.type == "json_object":
            return Json({"type": "object"})
        schema = (form.json_schema or {}).get("schema")
        if form.type != "json_schema" or not isinstance(schema, dict):
            allowed = "'text', 'json_object', or 'json_schema' with json_schema.schema"
            raise bad(f"response_format must be {allowed}", "response_format")
        return Json(schema)


class CompletionBody(GenerateBody):
    prompt: str | TokenIds | Texts | Annotated[list[TokenIds], Field(fail_fast=True)]
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    def prompts(self) -> list[str] | list[list[int]]:
        prompt = self.prompt
        many = not isinstance(prompt, str) and bool(prompt) and not isinstance(prompt[0], int)
        prompts = prompt if many else [prompt]
        num = len(prompts) * (self.n or 1)
        if not 1 <= num <= MAX_PROMPTS:
            name = "prompt" if self.n in (None, 1) else "n"
            raise bad(f"{name}: prompts x n must be 1 to {MAX_PROMPTS}, got {num}", name)
        return prompts  # pyright: ignore[reportReturnType]

    @property
    def only_echo(self) -> bool:
        return bool(self.echo) and self.max_tokens == 0

    def params(self, defaults: dict[str, Any]) -> SamplingParams:
        if self.echo and self.truncate_prompt_tokens is not None:
            raise bad("echo must be false with truncate_prompt_tokens", "echo")
        scores = self.echo and self.logprobs is not None
        return self.sampling_params(
            defaults | {"max_tokens": SamplingParams().max_tokens},  # 16, as at OpenAI and in vLLM
            logprobs=self.logprobs,
            max_tokens=1 if self.only_echo else self.max_tokens,
            prompt_logprobs=self.logprobs if scores else self.prompt_logprobs,
        )


class TemplateBody(Body):
    """The fields of a chat that reach its template."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Messages | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    tools: Tools | None = None


class ChatBody(GenerateBody, TemplateBody):
    messages: Messages = Field(min_length=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    max_completion_tokens: int | None = None
    include_reasoning: bool | None = None
    tool_choice: Literal["none", "auto", "required"] | Tool | None = None
    parallel_tool_calls: bool | None = None

    def tool_use(self) -> ToolUse:
        """Return the tools and their choice. Raises `ApiError`."""
        functions = [tool.function for tool in self.tools or ()]
        schemas = {f.name: {"type": "object"} | (f.parameters or _NO_PARAMETERS) for f in functions}
        if len(schemas) < len(functions) or any(s["type"] != "object" for s in schemas.values()):
            raise bad("tools must have names of their own, and schemas of objects", "tools")
        choice = self.tool_choice or ("auto" if schemas else "none")
        name = ""
        if isinstance(choice, Tool):
            name = choice.function.name
            choice = "named"
        is_known = name in schemas if name else bool(schemas)
        if choice != "none" and not is_known:
            raise bad("tool_choice must be 'none' or for one of the tools", "tool_choice")
        return ToolUse(schemas, choice, name, is_parallel=self.parallel_tool_calls is not False)

    def _grammar(self) -> Any:
        tools = self.tool_use()
        grammar = super()._grammar()
        return grammar if tools.choice == "none" else tools.grammar()

    def params(self, defaults: dict[str, Any]) -> SamplingParams:
        """Return the sampling parameters. Without `max_tokens`, only the model's length limits an
        answer. Raises `ApiError`."""
        if self.top_logprobs and not self.logprobs:  # clients send 0 for none
            raise bad("top_logprobs must be 0 unless logprobs is true", "top_logprobs")
        max_tokens = self.max_completion_tokens
        max_tokens = self.max_tokens if max_tokens is None else max_tokens
        if self.truncate_prompt_tokens == -1:  # a default limit takes no room from the prompt
            defaults = {name: value for name, value in defaults.items() if name != "max_tokens"}
        return self.sampling_params(
            {"max_tokens": None} | defaults,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            max_tokens=max_tokens,
        )


def _width(num_top: int | None) -> int:
    return 0 if num_top is None else max(1, num_top)


class TokenizeBody(TemplateBody):
    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    model: str | None = None
    tokens: TokenIds


class LoadAdapterBody(Body):
    lora_name: str = Field(min_length=1)
    lora_path: str = Field(min_length=1)


class UnloadAdapterBody(Body):
    lora_name: str = Field(min_length=1)
