"""Facts of the wire that break clients elsewhere, each looked at in the bytes. Trap 68."""

from __future__ import annotations

import asyncio
import json
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.responses import Response

from common.engine_config import EngineStats
from common.llm import LLM, SamplingParams
from common.requests.tokenizer import Tokenizer
from common.serve import wire
from common.serve.app import ServeConfig, make_app
from common.serve.chat import ChatPrompts
from common.serve.conftest import MODEL, TEMPLATE, Running, metrics_of
from common.serve.deltas import CompletionDelta, RequestDelta
from common.serve.errors import ApiError
from common.serve.wire import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

PROMPT = "def fibonacci(n):\n    if n"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "a stack"}]}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 12} | fields


def answered_twice(server: Running, **fields: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Yield each choice of a complete answer, with its chunks in a stream of the same request."""
    _, whole = server.post("/v1/completions", body(**fields))
    *chunks, done = server.events("/v1/completions", body(**fields))
    assert done is None and {p["id"] for p in chunks} == {chunks[0]["id"]}
    assert {p["created"] for p in chunks} == {chunks[0]["created"]}
    for choice in whole["choices"]:
        yield choice, [c for p in chunks for c in p["choices"] if c["index"] == choice["index"]]


def test_an_answer_is_that_of_generate(server: Running, alone: LLM) -> None:
    status, answer = server.post("/v1/completions", body())
    params = SamplingParams(temperature=0, max_tokens=12)
    expected = alone.generate(PROMPT, params, use_tqdm=False)[0].outputs[0]
    choice = answer["choices"][0]
    assert status == 200 and choice["text"] == expected.text
    assert choice["finish_reason"] == expected.finish_reason == "length"
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["object"] == "text_completion" and answer["model"] == MODEL


def test_joined_chunks_equal_the_whole(server: Running) -> None:
    for fields in (
        {},
        {"n": 3, "temperature": 0.9, "seed": 5},
        {"stop": ["return", "n -"]},
        {"prompt": [PROMPT, "import os"], "n": 2, "seed": 3, "temperature": 1.0},
        {"logprobs": 2, "echo": True},
        {"echo": True, "max_tokens": 0, "logprobs": 1},
    ):
        for choice, again in answered_twice(server, **fields):
            assert "".join(c["text"] for c in again) == choice["text"], fields
            reasons = [c["finish_reason"] for c in again]
            assert reasons[-1] == choice["finish_reason"] and not any(reasons[:-1]), fields
            if choice["logprobs"] is not None:
                for name, values in choice["logprobs"].items():
                    joined = [value for c in again for value in c["logprobs"][name]]
                    assert joined == values, (fields, name)


def test_of_a_chat_the_role_comes_once_and_content_always(template_server: Running) -> None:
    chat = CHAT | {"max_tokens": 8, "temperature": 0, "stream_options": {"include_usage": True}}
    *chunks, usage, done = template_server.events("/v1/chat/completions", chat)
    assert done is None and usage["choices"] == [] and usage["usage"]["completion_tokens"] == 8
    assert {p["object"] for p in [*chunks, usage]} == {"chat.completion.chunk"}
    deltas = [p["choices"][0]["delta"] for p in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert all("role" not in d and "content" in d for d in deltas[1:])
    assert all(p["usage"] is None for p in chunks)
    assert template_server.post("/v1/chat/completions", chat)[0] == 400, "options of no stream"
    del chat["stream_options"]
    _, whole = template_server.post("/v1/chat/completions", chat)
    message = whole["choices"][0]["message"]
    assert message["role"] == "assistant" and message["content"] == "".join(
        d["content"] for d in deltas
    )
    assert whole["object"] == "chat.completion"


def test_usage_is_not_sent_unasked(server: Running) -> None:
    always = {"continuous_usage_stats": True}  # as at vLLM: nothing by itself
    for options in (None, always):
        *chunks, _ = server.events("/v1/completions", body(stream_options=options))
        assert not any("usage" in chunk for chunk in chunks)
    fields = {"stream_options": always | {"include_usage": True}, "ignore_eos": True}
    *chunks, _ = server.events("/v1/completions", body(**fields))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 12


def test_half_a_character_is_never_sent(server: Running) -> None:
    """Tokens of one byte each: those of four characters, and two of them as they are drawn."""
    tokenizer = server.llm.tokenizer
    ids = tokenizer.encode("é€😀!")
    assert len(ids) == 10, "the shipped tokenizer cuts them into bytes"
    drawn = {"allowed_token_ids": ids[:2], "temperature": 99, "max_tokens": 37}
    for fields in (
        {"structured_outputs": {"regex": "é€😀!"}},
        drawn,
        drawn | {"stop": ["éé", "é\ufffdé"]},
        drawn | {"stop": ["éé", "é\ufffdé"], "include_stop_str_in_output": True},
    ):
        fields = {"n": 2, "seed": 6, "return_token_ids": True} | fields
        choices = []
        for choice, chunks in answered_twice(server, **fields):
            choices.append(choice)
            data = b"".join(map(tokenizer.token_bytes, choice["token_ids"]))
            expected = data.decode(errors="replace").removesuffix("<|endoftext|>")
            if "stop" in fields:
                stop = choice["stop_reason"]
                kept = stop if "include_stop_str_in_output" in fields else ""
                expected = expected[: expected.index(stop)] + kept
            assert choice["text"] == expected
            text, token_ids = "", []
            for again in chunks:
                text, token_ids = text + again["text"], token_ids + again["token_ids"]
                assert expected.startswith(text), "nothing is taken back"
            assert (text, token_ids) == (expected, choice["token_ids"])
        if "stop" in fields:
            assert [choice["stop_reason"] for choice in choices] == fields["stop"][::-1]
        elif "structured_outputs" in fields:
            assert choices[1]["text"] == "é€😀!"


def test_minus_infinity_is_a_number(server: Running) -> None:
    fields = {"logprobs": 3, "max_tokens": 2}
    _, answer = server.post("/v1/completions", body(**fields))
    assert all(p <= 0 for p in answer["choices"][0]["logprobs"]["token_logprobs"])
    from common.serve.answers import finite, to_json

    assert finite(float("-inf")) == -9999.0
    with pytest.raises(ValueError, match="Out of range"):
        to_json(float("nan"))


def test_logprobs_are_those_of_generate(
    server: Running, alone: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=2)
    expected = alone.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].logprobs
    assert expected is not None
    _, answer = server.post("/v1/completions", body(max_tokens=5, logprobs=2))
    found = answer["choices"][0]["logprobs"]
    assert found["token_logprobs"] == pytest.approx([e.logprob for e in expected])
    assert "".join(found["tokens"]) == answer["choices"][0]["text"]
    assert [len(top) for top in found["top_logprobs"]] == [2] * 5
    starts = [sum(map(len, found["tokens"][:i])) for i in range(5)]
    assert found["text_offset"] == starts
    monkeypatch.setattr("common.serve.answers.TextPlaces", None)
    status, answer = server.post("/v1/completions", body(max_tokens=5))
    assert status == 200, "places are only found where log-probabilities say them"


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "x = '😀'\nprint(x)", "echo": True},
        {"prompt": "<|endoftext|>é😀", "echo": True, "return_tokens_as_token_ids": True},
        {"logit_bias": {"0": 100.0}, "ignore_eos": True},
        {"logit_bias": {"0": 100.0}, "ignore_eos": True, "skip_special_tokens": False},
        {"stop": ["return"], "max_tokens": 20},
        {"temperature": 2.0, "seed": 3, "max_tokens": 30, "n": 2},
    ],
    ids=["cut character", "named by ids", "skipped", "shown", "stop", "bytes of no character"],
)
def test_text_offset_is_where_the_token_begins_in_the_text(
    server: Running, shipped_tokenizer: Tokenizer, fields: dict[str, Any]
) -> None:
    """Whole and streamed. A token that cuts a character begins where the character does."""
    sent = {"logprobs": 1, "return_token_ids": True} | fields
    for choice, again in answered_twice(server, **sent):
        text, offsets = choice["text"], choice["logprobs"]["text_offset"]
        assert (
            [o for c in again for o in c["logprobs"]["text_offset"]] == offsets == sorted(offsets)
        )
        ids = choice["token_ids"]
        if "echo" in fields:
            ids = choice["prompt_token_ids"] + ids
        tokens = [shipped_tokenizer.token_bytes(i).decode(errors="replace") for i in ids]
        assert len(tokens) == len(offsets)
        for i, (token, place) in enumerate(zip(tokens, offsets)):
            is_skipped = (
                ids[i] == 0 and "skip_special_tokens" not in fields and "echo" not in fields
            )
            if "\ufffd" not in token and not is_skipped:
                assert text[place:].startswith(token) or place + len(token) > len(text), (i, token)
            elif not is_skipped and place < len(text):
                assert text[place] == "\ufffd" or not text[place].isascii(), (i, token)


def test_a_model_is_asked_for_by_its_name(server: Running) -> None:
    status, _, content = server.request("GET", f"/v1/models/{MODEL}")
    listed = json.loads(server.request("GET", "/v1/models")[2])["data"]
    assert status == 200 and json.loads(content) == listed[0]
    status, _, content = server.request("GET", "/v1/models/org/other")
    assert (status, json.loads(content)["error"]["code"]) == (404, "model_not_found")


def test_a_route_that_is_not_built_is_named_whatever_is_sent(server: Running) -> None:
    form = {"Content-Type": "multipart/form-data; boundary=x"}
    status, _, content = server.request("POST", "/v1/audio/transcriptions", b"--x--", form)
    error = json.loads(content)["error"]
    assert status == 404 and "POST /v1/audio/transcriptions is not served here" in error["message"]
    assert error["type"] == "not_found_error"


def test_an_answers_id_is_that_of_its_request(server: Running, template_server: Running) -> None:
    sent = body(max_tokens=1)
    for found, path, kind in (
        (server, "/v1/completions", "cmpl"),
        (template_server, "/v1/chat/completions", "chatcmpl"),
    ):
        fields = sent if kind == "cmpl" else CHAT | {"max_tokens": 1}
        for more, header in ({}, "mine"), ({"request_id": "no"}, "mine"), ({"request_id": "a"}, ""):
            name = found.post(path, fields | more, **{"X-Request-Id": header} if header else {})
            assert name[1]["id"] == f"{kind}-{header or 'a'}"
        _, headers, content = found.request("POST", path, fields)
        assert json.loads(content)["id"] == f"{kind}-{headers['x-request-id']}"


def test_the_template_is_given_documents_and_the_effort(
    template_server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = template_server.app.state.server.chat
    monkeypatch.setattr(chat, "_template", "{{ documents[0].title }} {{ reasoning_effort }}")
    sent = CHAT | {"documents": [{"title": "One"}], "reasoning_effort": "low"}
    sent["chat_template_kwargs"] = {"reasoning_effort": "high"}  # as at vLLM: the field counts
    for path, name in ("/tokenize", "tokens"), ("/v1/chat/completions/render", "token_ids"):
        ids = template_server.post(path, sent)[1][name]
        assert template_server.llm.tokenizer.decode(ids) == "One low", path
    monkeypatch.setattr(chat, "_template", "{{ enable_thinking }} {{ reasoning_effort }}")
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    for fields, expected in (  # as in vLLM: what is said of thinking itself counts
        ({"reasoning_effort": "none"}, "False none"),
        ({"reasoning_effort": "high"}, "True high"),
        ({"reasoning_effort": "high", **off}, "False high"),
        ({"reasoning_effort": "none", "enable_thinking": True}, "True none"),
        ({}, " "),
    ):
        ids = template_server.post("/tokenize", {"messages": CHAT["messages"], **fields})[1][
            "tokens"
        ]
        assert template_server.llm.tokenizer.decode(ids) == expected


def test_tokens_there_and_back(server: Running) -> None:
    _, found = server.post("/tokenize", {"prompt": PROMPT})
    assert found["tokens"] == server.llm.tokenizer.encode(PROMPT) and found["count"] > 3
    assert server.post("/detokenize", {"tokens": found["tokens"]})[1] == {"prompt": PROMPT}
    special = {"tokens": server.llm.tokenizer.encode("<|endoftext|>")}
    assert server.post("/detokenize", special)[1] == {"prompt": "<|endoftext|>"}
    _, rendered = server.post("/v1/completions/render", body())
    assert rendered[0]["token_ids"] == found["tokens"]
    _, named = server.post("/tokenize", {"prompt": PROMPT, "return_token_strs": True})
    assert "".join(named["token_strs"]) == PROMPT
    for prompt in (PROMPT, found["tokens"]):
        _, answer = server.post("/v1/completions", body(prompt=prompt, echo=True, max_tokens=0))
        assert answer["choices"][0]["text"] == PROMPT
        assert answer["usage"]["completion_tokens"] == 0
    _, answer = server.post("/v1/completions", body(return_token_ids=True))
    _, text = server.post("/detokenize", {"tokens": answer["choices"][0]["token_ids"]})
    assert text["prompt"] == answer["choices"][0]["text"]


def test_many_tokens_do_not_hold_up_the_loop(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer is written here: FastAPI looks at each item of a list, for ten times as long. And
    between two prompts of a request the loop may do something else."""
    routes = server.app.state.server
    request: Any = SimpleNamespace(client=None, state=SimpleNamespace(num_body_bytes=1))
    chat = ChatBody.model_validate(CHAT)
    monkeypatch.setattr(routes.chat, "text", lambda *_: "x")
    prompts = CompletionBody(prompt=["a", "b", "c"])
    turns, seen = 0, list[int]()

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def answers() -> list[Any]:
        turning = asyncio.ensure_future(turn())

        encode = server.llm.tokenizer.encode
        noting = lambda *suffix: seen.append(turns) or encode(*suffix)  # noqa: E731
        monkeypatch.setattr(server.llm.tokenizer, "encode", noting)
        try:
            return [
                await routes.render_completion(prompts, request),
                await routes.render_chat(chat, request),
                await routes.tokenize(TokenizeBody(prompt="x"), request),
                await routes.detokenize(DetokenizeBody(tokens=[5])),
            ]
        finally:
            turning.cancel()

    found = asyncio.run_coroutine_threadsafe(answers(), server.loop).result(60)
    assert all(isinstance(answer, Response) for answer in found)
    assert len(set(seen[:3])) == 3, seen


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_where_a_request_says_nothing_the_models_makers_do(
    template_server: Running, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_server.app.state.server, "defaults", {"top_p": 7.0})
    for route in path, f"{path}/render":
        sent = CHAT | {"prompt": "x", "max_tokens": 1}
        status, answer = template_server.post(route, sent)
        assert (status, answer["error"]["param"]) == (400, "top_p")
        assert template_server.post(route, sent | {"top_p": 1})[0] == 200
    monkeypatch.setattr("common.serve.app.sampling_defaults", lambda config: {"top_k": 5})
    app, _ = make_app(template_server.llm, ServeConfig(MODEL))
    assert app.state.server.defaults == {"top_k": 5}


def test_special_tokens_are_added_unless_not_wanted(
    server: Running, template_server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chat's template has them already."""
    for one, path, suffix, by_default in (
        (server, "/v1/completions", {"prompt": "x"}, True),
        (server, "/tokenize", {"prompt": "x"}, True),
        (template_server, "/tokenize", {"messages": CHAT["messages"]}, False),
    ):
        encode, seen = one.llm.tokenizer.encode, list[bool]()
        noting = lambda text, adds: seen.append(adds) or encode(text, adds)  # noqa: E731
        with monkeypatch.context() as patch:
            patch.setattr(one.llm.tokenizer, "encode", noting)
            for adds in (None, True, False):
                sent = suffix | {"max_tokens": 1, "add_special_tokens": adds}
                assert one.post(path, sent)[0] == 200
        assert seen == [by_default, True, False], path
    encode = server.llm.tokenizer.encode
    with monkeypatch.context() as patch:  # a tokenizer that adds a BOS
        patch.setattr(server.llm.tokenizer, "encode", lambda t, adds: [0] * adds + encode(t, adds))
        for sent in {"prompt": ""}, {"prompt": ["", "x"], "echo": True, "logprobs": 1}:
            status, answer = server.post("/v1/completions", sent | {"max_tokens": 1})
            assert (status, answer["usage"]["prompt_tokens"]) == (
                200,
                1 if sent["prompt"] == "" else 3,
            )
        assert answer["choices"][0]["logprobs"]["text_offset"] == [0, 0]
        sent = {"prompt": "", "add_special_tokens": False}
        for path in "/v1/completions", "/v1/completions/render":
            assert server.post(path, sent)[1]["error"]["param"] == "prompt"


def test_only_a_request_with_the_salt_hits_the_cache(server: Running) -> None:
    def num_cached(salt: str | None) -> int:
        _, answer = server.post("/v1/completions", body(prompt=[7] * 40, cache_salt=salt))
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [num_cached(salt) for salt in ("a", "b", "a")] == [0, 0, 32]
    fields = {"cache_salt": "a", "stream_options": {"include_usage": True}}
    *_, last, _ = server.events("/v1/completions", body(prompt=[7] * 40, **fields))
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == 32, "counted once"


def test_json_objects_are_json(server: Running) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    _, answer = server.post("/v1/completions", body(response_format=form, max_tokens=60))
    found = json.loads(answer["choices"][0]["text"])
    assert list(found) == ["a"] and isinstance(found["a"], bool)
    form = {"type": "json_object"}
    _, answer = server.post("/v1/completions", body(response_format=form))
    assert answer["choices"][0]["text"].lstrip().startswith("{")
    outputs = {"choice": ["yes", "no"]}
    _, answer = server.post("/v1/completions", body(structured_outputs=outputs))
    assert answer["choices"][0]["text"] in ("yes", "no")


def test_metrics_have_vllms_names(server: Running) -> None:

    def numbers() -> defaultdict[str, float]:
        lines = server.request("GET", "/metrics")[2].decode().splitlines()
        found = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
        return defaultdict(float, {name: float(number) for name, number in found})

    before, num_prompt = numbers(), len(server.llm.tokenizer.encode(PROMPT))
    assert server.post("/v1/completions", body(prompt=[10**9]))[0] == 400
    server.post("/v1/completions", body(ignore_eos=True))
    increments = {name: number - before[name] for name, number in numbers().items()}
    (latencies,) = [name for name in increments if "inter_token_latency_seconds_count" in name]
    assert increments[latencies] == 11
    times = ["time_to_first_token", "e2e_request_latency", "request_queue_time"]
    times += ["request_prefill_time", "request_decode_time", "request_inference_time"]
    for name in (*times, "request_time_per_output_token"):
        (count, total) = (
            sum(n for key, n in increments.items() if f"{name}_seconds_{suffix}" in key)
            for suffix in ("count", "sum")
        )
        assert count == 1 and 0 <= total < 60, name

    def increment(name: str) -> float:
        (value,) = [n for key, n in increments.items() if key.startswith(name)]
        return value

    num_cached = increment("vllm:prompt_tokens_cached_total")
    for name, number, count in (
        ("request_prompt_tokens", num_prompt, 1),
        ("request_generation_tokens", 12, 1),
        ("request_max_num_generation_tokens", 12, 1),
        ("request_params_max_tokens", 12, 1),
        ("request_params_n", 1, 1),
        ("request_prefill_kv_computed_tokens", num_prompt - num_cached, 1),
        ("iteration_tokens_total", num_prompt - num_cached + 11, 12),
    ):
        assert increment(f"vllm:{name}_count") == count and increment(f"vllm:{name}_sum") == number
    route = 'http_requests_total{handler="/v1/completions",method="POST",status='
    assert (increment(f'{route}"4xx"'), increment(f'{route}"2xx"')) == (1, 1)
    assert not [name for name in increments if 'handler="/metrics"' in name], "as in vLLM"
    (cache,) = [key for key in increments if key.startswith("vllm:cache_config_info")]
    assert 'block_size="16"' in cache and 'num_gpu_blocks="399"' in cache
    reasons = {
        name: n for name, n in increments.items() if name.startswith("vllm:request_success_t")
    }
    assert len(reasons) == 4, "from the start, for who adds them up"
    ended = [name for name, number in reasons.items() if number]
    assert len(ended) == 1 and "length" in ended[0], "what is refused has not begun"
    stats = EngineStats(num_running=3, num_waiting=2, kv_blocks_in_use=1, kv_blocks_total=4)
    text = metrics_of(stats).text().decode()
    for name, number in ("requests_running", 3), ("requests_waiting", 2), ("usage_perc", 0.25):
        assert re.search(rf"{name}{{.*}} {number}", text)
    assert "spec_decode" not in text and "lora" not in text, "an engine without them"


def test_each_family_of_vllm_is_served_or_missing_for_a_reason() -> None:
    stats = EngineStats(scheduled_tokens=77, steps_by_tokens=[1, 2, *[0] * 10, 3, 1])
    stats.num_drafted_passes, stats.num_drafted_tokens, stats.num_accepted_tokens = 5, 20, 8
    stats.accepted_by_position = [5, 3]
    stats.running_adapters, stats.waiting_adapters = ["a", "b"], ["b"]
    metrics = metrics_of(stats, speculative={"method": "ngram"}, max_loras=2)
    metrics.on_response("/v1/models", "GET", 200, 0.5)
    metrics.on_response("none", "BREW", 404, 0.5)
    families = list(text_string_to_metric_families(metrics.text().decode()))
    found = {f.name: f.type for f in families if not f.name.endswith("_created")}
    table = (Path(wire.__file__).parent / "vllm_metrics.txt").read_text().splitlines()
    rows = [line.split(maxsplit=2) for line in table if not line.startswith("#")]
    assert found == {name: kind for name, kind, *missing in rows if not missing}
    samples = {sample.name: sample.labels for f in families for sample in f.samples}
    assert samples["vllm:lora_requests_info"] == {
        **{"max_lora": "2", "running_lora_adapters": "a,b", "waiting_lora_adapters": "b"}
    }
    text, labels = metrics.text().decode(), 'engine="0",model_name="tiny"'
    for line in (
        'http_requests_total{handler="/v1/models",method="GET",status="2xx"} 1.0',
        'http_requests_total{handler="none",method="none",status="4xx"} 1.0',
        'vllm:iteration_tokens_total_bucket{engine="0",le="8.0",model_name="tiny"} 3.0',
        'vllm:iteration_tokens_total_bucket{engine="0",le="16384.0",model_name="tiny"} 6.0',
        f"vllm:iteration_tokens_total_count{{{labels}}} 7.0",
        f"vllm:iteration_tokens_total_sum{{{labels}}} 77.0",
        f"vllm:spec_decode_num_drafts_total{{{labels}}} 5.0",
        f"vllm:spec_decode_num_draft_tokens_total{{{labels}}} 20.0",
        f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}} 8.0",
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="1"}} 3.0',
    ):
        assert f"\n{line}\n" in text


async def test_the_first_tokens_time_is_known_before_a_request_ends() -> None:
    """Also for a client that disconnects after it; a request that was only accepted has none, nor
    one that ends without any token."""
    metrics = metrics_of(EngineStats())

    def count() -> float:
        found = re.search(r"time_to_first_token_seconds_count{.*} (\S+)", metrics.text().decode())
        assert found is not None
        return float(found[1])

    async def request() -> AsyncIterator[RequestDelta]:
        yield RequestDelta("x", prompt_token_ids=[5])
        for i in range(2):
            yield RequestDelta("x", {0: CompletionDelta(0, "a", [i])})

    async def failed() -> AsyncIterator[RequestDelta]:
        yield RequestDelta("x", {0: CompletionDelta(0, "", [], None, "error")}, finished=True)

    found, deltas = [], metrics.counted(request(), SamplingParams())
    async for _ in deltas:
        found.append(count())
    await metrics.counted(request(), SamplingParams()).aclose()
    one = metrics.counted(request(), SamplingParams())
    await anext(one)
    await one.aclose()
    assert [delta.finished async for delta in metrics.counted(failed(), SamplingParams())] == [True]
    assert [*found, count()] == [0, 1, 1, 1]


def test_a_template_gets_texts(template_server: Running) -> None:
    def tokens(messages: list[dict[str, Any]], **others: Any) -> tuple[int, Any]:
        return template_server.post("/tokenize", {"messages": messages, **others})

    encode = template_server.llm.tokenizer.encode
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert tokens([{"role": "user", "content": "x"}])[1]["tokens"] == encode("# x\ndef ")
    _, rendered = template_server.post("/v1/chat/completions/render", CHAT)
    assert rendered == {"model": MODEL, "token_ids": encode("# a stack\ndef ")}
    assert tokens([{"role": "user", "content": parts}])[1]["tokens"] == encode("# a\nb\ndef ")
    begun = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "def f("}]
    _, found = tokens(begun, continue_final_message=True)
    assert found["tokens"] == encode("# x\ndef f(")


def test_a_models_own_template_is_used_unless_there_is_another() -> None:
    def apply(messages: list[dict], *, chat_template: str | None, **_: Any) -> str:
        return f"{chat_template} of {messages[0]['content']}"

    source = SimpleNamespace(chat_template="own", apply_chat_template=apply)
    tokenizer: Any = SimpleNamespace(source=source)
    assert ChatPrompts(tokenizer).text(CHAT["messages"]) == "None of a stack"
    assert ChatPrompts(tokenizer, "other").text(CHAT["messages"]) == "other of a stack"
    source.chat_template = None
    with pytest.raises(ApiError, match="has no chat template") as caught:
        ChatPrompts(tokenizer).text(CHAT["messages"])
    way_out = Path(caught.value.message.split()[-1])
    assert (Path(__file__).parents[2] / way_out).read_text(encoding="utf-8") == TEMPLATE


def test_a_template_gets_messages_as_they_are_with_their_content_as_a_text() -> None:
    def apply(messages: list[dict], **_: Any) -> str:
        if messages[0]["role"] == "system":
            raise RuntimeError("no system, please")
        return json.dumps(messages)

    tokenizer: Any = SimpleNamespace(source=SimpleNamespace(apply_chat_template=apply))
    prompts = ChatPrompts(tokenizer, "a template")
    config = {"role": "assistant", "content": None, "name": "x"}
    assert json.loads(prompts.text([config])) == [config | {"content": ""}]
    with pytest.raises(ApiError, match="no system, please") as caught:
        prompts.text([{"role": "system", "content": "x"}])
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_log_probabilities_of_a_prompt(server: Running, alone: LLM) -> None:
    params = SamplingParams(max_tokens=1, prompt_logprobs=2)
    expected = alone.generate(PROMPT, params, use_tqdm=False)[0].prompt_logprobs
    assert expected is not None
    _, answer = server.post("/v1/completions", body(max_tokens=1, prompt_logprobs=2))
    found = answer["choices"][0]["prompt_logprobs"]
    assert found[0] is None and len(found) == len(expected)
    for entries, entry in zip(found[1:], expected[1:], strict=True):
        again = entries[str(entry.token_id)]
        assert again["logprob"] == pytest.approx(entry.logprob) and again["rank"] == entry.rank
        assert len(entries) == 2 + (entry.token_id not in entry.top)
