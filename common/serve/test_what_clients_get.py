"""Responses built from an engine's outputs, without server and engine."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from common.sampling.distributions import TokenLogprobs
from common.serve.answers import Answer, event_chunks
from common.serve.deltas import CompletionDelta, RequestDelta
from common.serve.large_json import json_chunks, to_json
from common.serve.tool_calls import Reader, ToolUse
from common.serve.wire import GenerateBody
from request import SamplingParams

LETTERS: Any = SimpleNamespace(
    token_bytes=lambda i, is_first=False: b"\xff" if i == 255 else chr(i).encode(),
    has_token=lambda i: True,
    special_ids=(),
    decode_errors="replace",
)
A, B, C = map(ord, "abc")
MINUS_INFINITY = float("-inf")


def answer(kind: str = "completion", n: int = 1, prompts: Any = (), **fields: Any) -> Answer:
    logprobs = 1 if fields.pop("logprobs", False) else None
    params = SamplingParams(n=n, logprobs=logprobs)
    return Answer(kind, "m", LETTERS, GenerateBody(**fields), params, prompts)


def total(*texts: str, prompt: Any = (A, B), scores: Any = None, **fields: Any) -> RequestDelta:
    """A whole request of so many continuations, last one first."""
    found = RequestDelta("x", prompt_token_ids=[*prompt], prompt_logprobs=scores, finished=True)
    found.num_cached_tokens = 1
    for i in reversed(range(len(texts))):
        ids = [*map(ord, texts[i])]
        found.completions[i] = CompletionDelta(i, texts[i], ids, None, "stop", "z")
        for name, value in fields.items():
            setattr(found.completions[i], name, value)
    return found


def read(content: Any) -> Any:
    """Decode as a client does. Content that is streamed in entries can be decoded once."""
    return json.loads(b"".join(json_chunks(content)))


def test_json_has_no_line_ends_of_any_kind_and_stays_text() -> None:
    text = "\x85 \u2028 \u2029 é \ud800"
    written = to_json({"a": text})
    assert b"\\u0085 \\u2028 \\u2029 \xc3\xa9 \\ud800" in written
    assert json.loads(written) == {"a": text}


def test_choices_and_usage_cover_all_prompts() -> None:
    one = answer(n=2, prompts=("P", "Q"))
    body = one.whole([total("ab", "c"), total("d", "e", prompt=(A, B, C))])
    assert [(c["index"], c["text"]) for c in body["choices"]] == [
        (0, "Pab"),
        (1, "Pc"),
        (2, "Qd"),
        (3, "Qe"),
    ]
    assert {(c["finish_reason"], c["stop_reason"]) for c in body["choices"]} == {("stop", "z")}
    assert body["id"].startswith("cmpl-") and body["created"] == one.created > 1e9
    usage = body["usage"]
    details = usage.pop("prompt_tokens_details")
    assert details == {"cached_tokens": 2}
    assert usage == {"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10}
    assert "token_ids" not in body["choices"][0] and "prompt_logprobs" not in body["choices"][0]


def test_a_chat_has_its_own_names() -> None:
    one = answer("chat", n=2)
    chunks = one.chunks(0, total("a", "b"))
    assert [chunk["choices"][0]["index"] for chunk in chunks] == [0, 1, 1, 0], "roles, then texts"
    role = {"role": "assistant", "content": ""}
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:2]] == [role] * 2
    (choice, _) = one.whole([total("a", "b")])["choices"]
    assert choice["message"] == {"role": "assistant", "refusal": None, "content": "a"}
    assert one.id.startswith("chatcmpl-") and choice["logprobs"] is None


@pytest.mark.parametrize(
    ("text", "prompt_end", "num"),
    [
        ("<think>\nab\n</think>c", "", 4),  # line breaks are tokens, marks do not count
        ("ab</think>c</think>", "<think>", 2),
        ("ab</thin", "<think>", 8),
        ("ab</think>c", "", 0),
        ('ab<tool_call>{"name": "f", "arguments": {}}</tool_call></think>c', "<think>", 2),
        ("ab<tool_call>x</think>c", "<think>", len("ab<tool_call>x")),
    ],
)
@pytest.mark.parametrize("shows", [True, False])
def test_the_tokens_of_a_thought_are_counted(
    text: str, prompt_end: str, num: int, shows: bool
) -> None:
    """Whether or not they are shown, and wherever a stream is cut."""
    for size in (1, 3, 100):
        one, sent = answer("chat", n=2), []
        one.reader, one.prompt_end = Reader(ToolUse({}, "auto"), True, shows), prompt_end
        one.chunks(0, RequestDelta("x", prompt_token_ids=[A]))
        for i in range(0, len(text), size):
            new, reason = text[i : i + size], "stop" if i + size >= len(text) else None
            deltas = {j: CompletionDelta(j, new, [*map(ord, new)], None, reason) for j in (0, 1)}
            sent += one.chunks(0, RequestDelta("x", deltas))
        details = one.usage_chunk()["usage"]["completion_tokens_details"]
        assert details == {"reasoning_tokens": 2 * num}
        assert any("reasoning" in c["choices"][0]["delta"] for c in sent) == (shows and num > 0)


def test_a_chunk_without_text_is_sent_if_it_has_other_fields() -> None:
    silent = CompletionDelta(0, "", [A])
    delta = RequestDelta("x", {0: silent}, [A])
    assert answer().chunks(0, delta) == []
    (chunk,) = answer(return_token_ids=True).chunks(0, delta)
    assert chunk["choices"][0]["token_ids"] == [A]
    silent.logprobs = [TokenLogprobs(A, -1.0, 1, {})]
    assert len(answer(logprobs=True).chunks(0, delta)) == 1


def test_minus_infinity_is_a_number_in_every_field() -> None:
    """A token that is not valid text by itself is one character."""
    entry = TokenLogprobs(255, MINUS_INFINITY, 3, {B: MINUS_INFINITY})
    whole = total("b", scores=[None, entry], logprobs=[entry])
    body = read(answer(logprobs=True, prompt_logprobs=1, prompts=("ab",)).whole([whole]))
    (choice,) = body["choices"]
    assert choice["logprobs"] == {
        "text_offset": [0, 1, 2],
        "token_logprobs": [None, -9999.0, -9999.0],
        "tokens": ["a", "\ufffd", "\ufffd"],
        "top_logprobs": [None, *[{"\ufffd": -9999.0, "b": -9999.0}] * 2],
    }
    assert choice["prompt_logprobs"] == [
        None,
        {
            str(B): {"logprob": -9999.0, "rank": 1, "decoded_token": "b"},
            "255": {"logprob": -9999.0, "rank": 3, "decoded_token": "\ufffd"},
        },
    ]
    (choice,) = read(answer("chat", logprobs=True).whole([whole]))["choices"]
    top = {"token": "b", "logprob": -9999.0, "bytes": [B]}
    content = {"token": "\ufffd", "logprob": -9999.0, "bytes": [255], "top_logprobs": [top]}
    assert choice["logprobs"] == {"content": [content]}
    (choice,) = answer(logprobs=True, return_tokens_as_token_ids=True).whole([whole])["choices"]
    assert choice["logprobs"]["tokens"] == ["token_id:255"]
    bare = TokenLogprobs(A, -0.5, 1, {})
    (choice,) = read(answer(logprobs=True).whole([total("a", logprobs=[bare])]))["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"a": -0.5}]
    scored = [total("a", prompt=[i], scores=[None], logprobs=[bare]) for i in (B, C)]
    body = answer(logprobs=True, prompts=("b", "c")).whole(scored)
    assert [c["logprobs"]["tokens"] for c in body["choices"]] == [["b", "a"], ["c", "a"]]


def test_prompt_fields_are_sent_once_with_a_chat_and_with_each_completion() -> None:
    """As at vLLM; of a stream the first pieces have it."""
    whole = total("a", "b", scores=[None])
    more = RequestDelta("x", {0: CompletionDelta(0, "c", [C])})
    for kind in "chat", "completion":
        one = answer(kind, n=2, return_token_ids=True, prompt_logprobs=0)
        body = read(one.whole([whole]))
        for holder in [body] if kind == "chat" else body["choices"]:
            assert (holder["prompt_token_ids"], holder["prompt_logprobs"]) == ([A, B], [None])
        assert ("prompt_token_ids" in body["choices"][0]) == (kind == "completion")
        one = answer(kind, n=2, return_token_ids=True)
        chunks = one.chunks(0, whole) + one.chunks(0, more)
        holders = chunks if kind == "chat" else [chunk["choices"][0] for chunk in chunks]
        found = [holder.get("prompt_token_ids") for holder in holders]
        assert found == [[A, B]] * 2 + [None] * (len(chunks) - 2)
        assert "prompt_token_ids" not in str(answer(kind).whole([total("a")]))


def test_json_in_chunks_is_the_same() -> None:
    """Trap 87."""
    entry = TokenLogprobs(A, -1.0, 1, {B: -2.0})
    total_of = total("ab", "c", scores=[None, entry], logprobs=[entry] * 2)
    for kind in "chat", "completion":
        fields = {"logprobs": True, "prompt_logprobs": 1, "return_token_ids": True}
        one, other = (answer(kind, n=2, **fields) for _ in range(2))
        other.id, other.created = one.id, one.created
        chunks = list(json_chunks(one.whole([total_of])))
        assert b"".join(chunks) == to_json(other.whole([total_of])) and len(chunks) > 20
        assert json.loads(b"".join(event_chunks({"a": iter([1])}))[6:]) == {"a": [1]}
