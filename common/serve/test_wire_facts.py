"""What a request gets from the one server of the session, looked at in the bytes. Trap 68."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from common.engine_config import SHIPPED_CHECKPOINT, EngineConfig, EngineStats
from common.llm import SamplingParams
from common.requests.tokenizer import load_tokenizer
from common.sampling.distributions import TokenLogprobs
from common.serve import wire
from common.serve.answers import Answer
from common.serve.app import ServeConfig, make_app
from common.serve.conftest import MODEL, Running
from common.serve.deltas import CompletionDelta, RequestDelta
from common.serve.errors import to_json
from common.serve.server_metrics import ServerMetrics
from common.serve.wire import GenerateBody

TOKENIZER = load_tokenizer(SHIPPED_CHECKPOINT)
PROMPT = "def fibonacci(n):\n    if n"
IDS = TOKENIZER.encode(PROMPT)
USER = {"role": "user", "content": "a stack"}
CHAT = {"model": MODEL, "messages": [USER], "temperature": 0, "max_tokens": 8}
BODY = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 12}
COMPLETIONS = "/v1/completions"
CHATS = "/v1/chat/completions"
TOKENIZE = "/tokenize"


# -- whole and streamed

BYTES = TOKENIZER.encode("é€😀!")  # one byte each
DRAWN = {"allowed_token_ids": BYTES[:2], "temperature": 99, "max_tokens": 37, "n": 2, "seed": 6}
TWO = {"prompt": [PROMPT, "import os"], "n": 2, "seed": 3, "temperature": 1.0}


def rounded(value: Any) -> Any:
    """Both answers need not have had the same neighbours in each step."""
    return json.loads(json.dumps(value), parse_float=lambda text: round(float(text), 9))


@pytest.mark.parametrize(
    "fields",
    [
        TWO | {"logprobs": 2, "echo": True},
        {"echo": True, "max_tokens": 0, "logprobs": 1},
        {"prompt": "<|endoftext|>x = é😀", "echo": True, "logprobs": 1},
        {"logit_bias": {"0": 100.0}, "ignore_eos": True, "logprobs": 1},
        {"stop": ["return", "n -"], "max_tokens": 20, "logprobs": 1},
        DRAWN | {"logprobs": 0},
        DRAWN | {"stop": ["éé", "é\ufffdé"]},
    ],
)
def test_joined_chunks_equal_the_whole(server: Running, fields: dict[str, Any]) -> None:
    """Half a character is never sent, and nothing is taken back."""
    sent = BODY | fields | {"return_token_ids": True}
    *events, done = server.events(COMPLETIONS, sent)
    assert done is None and not any("usage" in p for p in events), "nor unasked"
    assert len({(p["id"], p["created"]) for p in events}) == 1
    for choice in server.post(COMPLETIONS, sent)[1]["choices"]:
        chunks = [c for p in events for c in p["choices"] if c["index"] == choice["index"]]
        ids, text = choice["token_ids"], choice["text"]
        for name in "text", "token_ids":
            assert [part for c in chunks for part in c[name]] == [*choice[name]], name
        reasons = [chunk["finish_reason"] for chunk in chunks]
        assert reasons == [None] * (len(chunks) - 1) + [choice["finish_reason"]] != [None]
        prompt_ids = [chunk.get("prompt_token_ids") for chunk in chunks]
        assert prompt_ids == [choice["prompt_token_ids"]] + [None] * (len(chunks) - 1)
        if fields.get("max_tokens") == 0:
            ids = []
        pieces = [b"" if i == 0 else TOKENIZER.token_bytes(i) for i in ids]
        if "echo" in fields:
            pieces = [*map(TOKENIZER.token_bytes, choice["prompt_token_ids"]), *pieces]
        assert choice["stop_reason"] or text == b"".join(pieces).decode(errors="replace")
        if choice["logprobs"] is None:
            continue
        for name, values in choice["logprobs"].items():
            joined = [value for c in chunks for value in c["logprobs"][name]]
            assert rounded(joined) == rounded(values), name
        lengths = map(len, choice["logprobs"]["tokens"])
        assert choice["logprobs"]["text_offset"] == [*accumulate(lengths, initial=0)][:-1]


def test_of_a_chat_the_role_comes_once_and_content_always(server: Running) -> None:
    sent = CHAT | {"n": 2, "return_token_ids": True}
    *chunks, _ = server.events(CHATS, sent)
    _, whole = server.post(CHATS, sent)
    assert {p["object"] for p in [whole, *chunks]} == {"chat.completion", "chat.completion.chunk"}
    for i in range(2):
        first, *later = [c["delta"] for p in chunks for c in p["choices"] if c["index"] == i]
        assert first == {"role": "assistant", "content": ""}
        message = {"role": "assistant", "refusal": None}
        message["content"] = "".join(delta.pop("content") for delta in later)
        assert whole["choices"][i]["message"] == message and not any(later)
    ids = [p.get("prompt_token_ids") for p in chunks]
    assert ids == [whole["prompt_token_ids"]] * 2 + [None] * (len(chunks) - 2)


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        ({"continuous_usage_stats": True}, {None}),  # as at vLLM: nothing by itself
        ({"include_usage": True}, {None, 12}),
        ({"continuous_usage_stats": True, "include_usage": True}, {*range(1, 13)}),
    ],
)
def test_usage_is_sent_as_asked(server: Running, options: Any, counts: set[int | None]) -> None:
    sent = BODY | {"stream_options": options, "ignore_eos": True}
    *chunks, _ = server.events(COMPLETIONS, sent)
    found = [(chunk.get("usage") or {}).get("completion_tokens") for chunk in chunks]
    assert set(found) <= counts and found[-1] == (12 if 12 in counts else None)
    assert (chunks[-1]["choices"] == []) == (12 in counts)


# -- request and answer


SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
SCHEMA["additionalProperties"] = False
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
PARTS = USER | {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
CONTINUED: dict[str, Any] = {"messages": [USER, {"role": "assistant", "content": "def f("}]}
CONTINUED["continue_final_message"] = True
STRS = {"prompt": PROMPT, "return_token_strs": True}
FORMED = re.compile(r'\{\s*"a"\s*:\s*(true|false)\s*\}')
SALTED = {"prompt": [7] * 40}
CACHED = "usage.prompt_tokens_details.cached_tokens"
EOS = TOKENIZER.encode("<|endoftext|>")
TEXT, USAGE = "choices.0.text", "usage.completion_tokens"
TRANSCRIPTIONS = "POST /v1/audio/transcriptions: Not Found"


@pytest.mark.parametrize(
    ("path", "sent", "expected"),
    [
        (TOKENIZE, STRS, {"tokens": IDS, "count": len(IDS), "token_strs.0": "def"}),
        ("/detokenize", {"tokens": EOS + IDS}, {"prompt": f"<|endoftext|>{PROMPT}"}),
        (f"{COMPLETIONS}/render", {"prompt": [PROMPT, "x"]}, {"0.token_ids": IDS}),
        (f"{CHATS}/render", CHAT, {"token_ids": TOKENIZER.encode("# a stack\ndef ")}),
        (TOKENIZE, {"messages": [PARTS]}, {"tokens": TOKENIZER.encode("# a\nb\ndef ")}),
        (TOKENIZE, CONTINUED, {"tokens": TOKENIZER.encode("# a stack\ndef f(")}),
        (COMPLETIONS, {"prompt": IDS, "echo": True, "max_tokens": 0}, {TEXT: PROMPT, USAGE: 0}),
        (COMPLETIONS, TWO, {"choices.3.index": 3, "usage.prompt_tokens": len(IDS) + 2, USAGE: 48}),
        (COMPLETIONS, {"ignore_eos": True}, {"choices.0.finish_reason": "length", "model": MODEL}),
        (COMPLETIONS, {"response_format": FORM, "max_tokens": 60}, {TEXT: FORMED}),
        (COMPLETIONS, SALTED | {"cache_salt": "a"}, {CACHED: 0}),
        (COMPLETIONS, SALTED | {"cache_salt": "b"}, {CACHED: 0}),
        (COMPLETIONS, {"prompt": [[7] * 40, [8] * 9], "cache_salt": "a"}, {CACHED: 32}),
        (COMPLETIONS, {"request_id": "a"}, {"id": "cmpl-a", "object": "text_completion"}),
        (CHATS, CHAT | {"request_id": "a"}, {"id": "chatcmpl-a"}),
        (f"GET /v1/models/{MODEL}", None, {"id": MODEL, "max_model_len": 2048}),
        ("GET /v1/models/org/other", None, {"error.code": "model_not_found"}),
        ("/v1/audio/transcriptions", b"--x--", {"error.message": re.compile(TRANSCRIPTIONS)}),
    ],
)  # fmt: skip
def test_a_request_has_its_answer(
    server: Running, path: str, sent: Any, expected: dict[str, Any]
) -> None:
    method, _, path = path.rpartition(" ")
    body = BODY | sent if path == COMPLETIONS else sent
    answer = json.loads(server.request(method or "POST", path, body)[2])
    for place, value in expected.items():
        found = answer
        for key in place.split("."):
            found = found[int(key) if key.isdigit() else key]
        is_right = value.fullmatch(found) if isinstance(value, re.Pattern) else found == value
        assert is_right, (place, found)


def test_an_answers_id_is_that_of_its_header(server: Running) -> None:
    sent = BODY | {"request_id": "no"}
    assert server.post(COMPLETIONS, sent, **{"X-Request-Id": "mine"})[1]["id"] == "cmpl-mine"
    _, headers, content = server.request("POST", CHATS, CHAT)
    assert json.loads(content)["id"] == f"chatcmpl-{headers['x-request-id']}"


def test_the_template_is_given_documents_and_the_effort(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{{ (documents or [{}])[0].title }} {{ enable_thinking }} {{ reasoning_effort }}"
    monkeypatch.setattr(server.app.state.server.chat, "_template", template)
    given = {"enable_thinking": False, "reasoning_effort": "high"}
    one = {"documents": [{"title": "One"}], "chat_template_kwargs": given}
    for fields, expected in (  # as in vLLM: the field counts, and what is said of thinking itself
        ({"reasoning_effort": "low", **one}, "One False low"),
        ({"reasoning_effort": "low"}, " True low"),
        ({"reasoning_effort": "none"}, " False none"),
        ({"reasoning_effort": "none", "enable_thinking": True}, " True none"),
        ({}, "  "),
    ):
        for path, name in (TOKENIZE, "tokens"), (f"{CHATS}/render", "token_ids"):
            ids = server.post(path, {"messages": [USER], **fields})[1][name]
            assert TOKENIZER.decode(ids) == expected, path


def test_special_tokens_are_added_unless_not_wanted(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a tokenizer that adds a BOS. A chat's template has it already."""
    tokenizer = server.llm.tokenizer
    encode = server.llm.tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda t, adds: [0] * adds + encode(t, adds))
    for sent, by_default in ({"prompt": "x"}, True), ({"messages": [USER]}, False):
        for adds, expected in (None, by_default), (True, True), (False, False):
            _, found = server.post(TOKENIZE, sent | {"add_special_tokens": adds})
            assert (found["tokens"][0] == 0) == expected, (sent, adds)
    assert server.post(COMPLETIONS, {"prompt": ["", "x"]})[1]["usage"]["prompt_tokens"] == 3
    sent = {"prompt": "", "add_special_tokens": False}
    assert server.post(COMPLETIONS, sent)[1]["error"]["param"] == "prompt"


def test_where_a_request_says_nothing_the_models_makers_do(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.serve.app.sampling_defaults", lambda config: {"top_p": 7.0})
    app, _ = make_app(server.llm, ServeConfig(MODEL))
    monkeypatch.setattr(server.app.state.server, "defaults", app.state.server.defaults)
    for route, sent in (COMPLETIONS, BODY), (CHATS, CHAT):
        for path in route, f"{route}/render":
            assert server.post(path, sent)[1]["error"]["param"] == "top_p"
            assert server.post(path, sent | {"top_p": 1})[0] == 200


# -- numbers that JSON does not have, and JSON in parts


def test_minus_infinity_is_a_number() -> None:
    """In every field. A token that is not valid text by itself is one character."""
    with pytest.raises(ValueError, match="Out of range"):
        to_json(float("nan"))
    text = "\x85 \u2028 \u2029 é \ud800"  # nor has it line ends of any kind
    written = to_json({"a": text})
    assert b"\\u0085 \\u2028 \\u2029 \\u00e9 \\ud800" in written
    assert json.loads(written) == {"a": text}
    letters: Any = SimpleNamespace(
        token_bytes=lambda i, is_first=False: b"\xff" if i == 255 else chr(i).encode(),
        has_token=lambda i: True,
        special_ids=(),
        decode_errors="replace",
    )
    entry = TokenLogprobs(255, float("-inf"), 3, {98: float("-inf")})
    total = RequestDelta("x", {0: CompletionDelta(0, "b", [98], [entry], "stop")}, [97, 98])
    total.prompt_logprobs = [None, entry]
    total.finished = True

    def choice(kind: str, prompts: Any = (), **fields: Any) -> Any:
        about = letters, GenerateBody(**fields), SamplingParams(logprobs=1), prompts, False, "id"
        answer = Answer(kind, "m", *about)
        return json.loads(to_json(answer.whole([total])))["choices"][0]

    found = choice("completion", ("ab",), prompt_logprobs=1)
    assert found["logprobs"] == {
        "text_offset": [0, 1, 2],
        "token_logprobs": [None, -9999.0, -9999.0],
        "tokens": ["a", "\ufffd", "\ufffd"],
        "top_logprobs": [None, *[{"\ufffd": -9999.0, "b": -9999.0}] * 2],
    }
    first = {"logprob": -9999.0, "rank": 1, "decoded_token": "b"}
    third = {"logprob": -9999.0, "rank": 3, "decoded_token": "\ufffd"}
    assert found["prompt_logprobs"] == [None, {"98": first, "255": third}]
    top = {"token": "b", "logprob": -9999.0, "bytes": [98]}
    content = {"token": "\ufffd", "logprob": -9999.0, "bytes": [255], "top_logprobs": [top]}
    assert choice("chat")["logprobs"] == {"content": [content]}
    named = choice("completion", return_tokens_as_token_ids=True)
    assert named["logprobs"]["tokens"] == ["token_id:255"]


# -- what is counted


def test_metrics_have_vllms_names(server: Running) -> None:
    def numbers() -> defaultdict[str, float]:
        lines = server.request("GET", "/metrics")[2].decode().splitlines()
        found = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
        return defaultdict(float, {name: float(number) for name, number in found})

    before = numbers()
    assert server.post(COMPLETIONS, BODY | {"prompt": [10**9]})[0] == 400
    server.post(COMPLETIONS, BODY | {"ignore_eos": True})
    increments = {name: number - before[name] for name, number in numbers().items()}

    def increment(name: str) -> float:
        (value,) = [n for key, n in increments.items() if key.startswith(name)]
        return value

    times = ["time_to_first_token", "e2e_request_latency", "request_time_per_output_token"]
    times += [f"request_{name}_time" for name in ("queue", "prefill", "decode", "inference")]
    for name in times:
        assert increment(f"vllm:{name}_seconds_count") == 1, name
        assert 0 <= increment(f"vllm:{name}_seconds_sum") < 60, name
    num_computed = len(IDS) - increment("vllm:prompt_tokens_cached_total")
    numbers_of_12 = ["generation_tokens", "max_num_generation_tokens", "params_max_tokens"]
    expected = {f"vllm:request_{name}_sum": 12.0 for name in numbers_of_12} | {
        "vllm:inter_token_latency_seconds_count": 11,
        "vllm:request_prompt_tokens_sum": len(IDS),
        "vllm:request_params_n_sum": 1,
        "vllm:request_prefill_kv_computed_tokens_sum": num_computed,
    }
    assert {name: increment(name) for name in expected} == expected
    reasons = {key: n for key, n in increments.items() if key.startswith("vllm:request_success_t")}
    assert len(reasons) == 4, "from the start, for who adds them up"
    assert ["length" in key for key, number in reasons.items() if number] == [True]


def test_each_family_of_vllm_is_served_or_missing_for_a_reason() -> None:
    about: dict[str, Any] = dict(num_drafted_passes=5, num_drafted_tokens=20, num_accepted_tokens=8)
    about |= dict(num_running=3, num_waiting=2, kv_blocks_in_use=1, kv_blocks_total=4)
    llm: Any = SimpleNamespace(stats=EngineStats(**about), max_model_len=64)
    llm.config = EngineConfig(speculative={"method": "ngram"}, max_loras=2)
    metrics = ServerMetrics(llm, MODEL)
    text = metrics.text().decode()
    of_engine = 'engine="0",model_name="tiny"'
    families = list(text_string_to_metric_families(text))
    found = {f.name: f.type for f in families if not f.name.endswith("_created")}
    table = (Path(wire.__file__).parent / "vllm_metrics.txt").read_text().splitlines()
    rows = [line.split(maxsplit=2) for line in table if not line.startswith("#")]
    assert found == {name: kind for name, kind, *missing in rows if not missing}
    own = f"{{{of_engine}}}"
    drafted = "vllm:spec_decode_num_"
    for line in (
        f"vllm:num_requests_running{own} 3.0",
        f"vllm:num_requests_waiting{own} 2.0",
        f"vllm:kv_cache_usage_perc{own} 0.25",
        f"{drafted}drafts_total{own} 5.0",
        f"{drafted}draft_tokens_total{own} 20.0",
        f"{drafted}accepted_tokens_total{own} 8.0",
    ):
        assert f"\n{line}" in text, line
    llm.config = EngineConfig()
    text = ServerMetrics(llm, MODEL).text().decode()
    assert "spec_decode" not in text, "an engine without it"
