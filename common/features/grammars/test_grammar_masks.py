"""Bits, matchers and what is done with logits, beside a second library and beside trying all."""

from __future__ import annotations

import json
import logging
import random
import re
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from itertools import product
from queue import SimpleQueue
from threading import Event
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
import xgrammar
from llguidance import LLMatcher, LLTokenizer

from common.engine_config import SHIPPED_CHECKPOINT
from common.features.grammars import grammar_compiler
from common.features.grammars.grammar_compiler import SHORT, GrammarCompiler, GrammarJob
from common.features.grammars.grammar_masks import GrammarMasks
from common.features.grammars.json_schema import FORMATS, rewritten
from common.features.grammars.lark_text import TOO_MANY_WAYS, compile_source
from common.features.grammars.vocabulary import Vocabulary, beginning_of, tokenizer_of
from common.requests.tokenizer import load_tokenizer
from common.sampling.sampling_constraints import forbid
from common.tests.grammar_cases import (
    CASES,
    EOS,
    LIMITS,
    may_come,
    small_tokenizer,
    texts_of,
)
from grammars import Choice, Ebnf, Grammar, Json, Regex, source_of

SCHEMA = {
    "type": "object",
    "properties": {
        "age": {"type": "integer"},
        "ages": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        "kind": {"enum": ["a", "bc", None]},
    },
    "required": ["age", "ages", "kind"],
    "additionalProperties": False,
}
TOKENIZER = small_tokenizer()
SMALL = Vocabulary.of(TOKENIZER, TOKENIZER.vocab_size, [EOS])
SPELL = {TOKENIZER.token_bytes(i).decode(): i for i in range(TOKENIZER.vocab_size)}
DATE = r"[0-9]{4}-(0[1-9]|1[0-2])( [a-zé]+)*"
BYTES = Vocabulary((b"", *(bytes([i]) for i in range(256))), eos_token_ids=(0,))
HEADS = ["def f(self):", "def f(self, x):", 'a "b" \\ c\n', "größer"]
# The same grammar, as xgrammar compiles it. (For recursive rules its masks lack tokens that its
# matcher takes: after "a" of `root ::= "a" root "b" | "ab"` a token "abb". A string with
# `maxLength` may hold raw control characters, which is invalid JSON; and it ignores keywords of a
# schema that it does not support, such as `multipleOf`. Version 0.2.8.)
PAIRS: dict[str, tuple[Grammar, Callable[[xgrammar.GrammarCompiler], object]]] = {
    "json": (
        Json(SCHEMA, max_whitespace=0),
        lambda compiler: compiler.compile_json_schema(json.dumps(SCHEMA), any_whitespace=False),
    ),
    "regex": (Regex(DATE), lambda compiler: compiler.compile_regex(DATE)),
    "choice": (
        Choice(HEADS),
        lambda compiler: compiler.compile_grammar(
            "root ::= " + " | ".join(json.dumps(head, ensure_ascii=False) for head in HEADS)
        ),
    ),
}


def bits_of(masks: np.ndarray, vocab_size: int) -> np.ndarray:
    """Ids for which the only row has a bit."""
    row = np.unpackbits(masks[0].view(np.uint8), bitorder="little")
    assert not row[vocab_size:].any(), "lanes without a token"
    return np.flatnonzero(row[:vocab_size])


class Matching:
    """One grammar, and the tokens that have been taken."""

    def __init__(self, vocabulary: Vocabulary, grammar: Grammar, **limits: Any) -> None:
        self.vocabulary = vocabulary
        self.vocab_size = len(vocabulary.token_bytes)
        self.limits = limits.get("stop_token_ids", ()), limits.get("min_tokens", 0)
        self.compiled = compile_source(source_of(grammar), tokenizer_of(vocabulary))
        self.begin()

    def begin(self) -> None:
        self.matched = GrammarMasks(self.vocabulary).match(self.compiled, *self.limits)
        self.outputs: list[int] = []

    def draw(self, rng: random.Random, max_len: int = 60) -> str | None:
        """A text of tokens drawn evenly. None: it was cut off. A dead end fails."""
        self.begin()
        eos = self.vocabulary.eos_token_ids[0]
        while len(self.outputs) < max_len and eos not in self.outputs:
            allowed = self.allowed().tolist()
            assert allowed, f"nothing fits after {self.text!r}"
            self.outputs.append(rng.choice(allowed))
        return self.text if eos in self.outputs else None

    def takes(self, tokens: list[int]) -> bool:
        return self.matched.num_possible(tokens) == len(tokens)

    @property
    def text(self) -> str:
        found = b"".join(self.vocabulary.token_bytes[i] for i in self.outputs)
        return found.decode(errors="replace")

    def follow(self) -> None:
        self.matched.follow(state_of(self.outputs), 0)

    def bits(self, num_rows: int) -> np.ndarray:
        return np.full((num_rows, -(-self.vocab_size // 32)), -1, dtype=np.int32)

    def allowed(self) -> np.ndarray:
        self.follow()
        bits = self.bits(1)
        self.matched.fill(bits, 0, ())
        return bits_of(bits, self.vocab_size)


def state_of(outputs: list[int], prompt: tuple[int, ...] = (3, 4)) -> SimpleNamespace:
    return SimpleNamespace(
        token_ids=np.array([[*prompt, *outputs]], dtype=np.int32),
        num_prompt_tokens=np.array([len(prompt)]),
        num_tokens=np.array([len(prompt) + len(outputs)]),
        known=lambda token_id: token_id,
    )


@pytest.mark.parametrize("name", PAIRS)
def test_two_libraries_allow_the_same_tokens(name) -> None:
    """Bit for bit, along texts drawn at random, of the tokenizer that is shipped."""
    tokenizer = load_tokenizer(SHIPPED_CHECKPOINT)
    eos = tokenizer.eos_token_id
    vocab_size = tokenizer.vocab_size
    vocabulary = Vocabulary.of(tokenizer, vocab_size, [eos])
    grammar, as_xgrammar = PAIRS[name]
    info = xgrammar.TokenizerInfo(list(vocabulary.token_bytes), stop_token_ids=[eos])
    compiled = as_xgrammar(xgrammar.GrammarCompiler(info, max_threads=1))
    rng = random.Random(name)
    num_masks = 0
    for _ in range(4):
        ours = Matching(vocabulary, grammar)
        other = xgrammar.GrammarMatcher(compiled)
        while len(ours.outputs) < 40 and eos not in ours.outputs:
            theirs = torch.zeros(1, -(-vocab_size // 32), dtype=torch.int32)
            other.fill_next_token_bitmask(theirs)
            allowed = ours.allowed().tolist()
            assert allowed == bits_of(theirs.numpy(), vocab_size).tolist(), ours.outputs
            ours.outputs.append(rng.choice(allowed))
            assert other.accept_token(ours.outputs[-1])
            num_masks += 1
    assert num_masks >= 20


@pytest.mark.parametrize(
    ("rules", "pattern"),
    [
        ('root ::= word "b"\nword ::= [a-z]+ # greedy ones never come to the b', "[a-z]+b"),
        ('root ::= word word\nword ::= [ab]+ "c"?', "([ab]+c?){2}"),
        ('root ::= x "a"\nx ::= "a" x | ""', "a*a"),
        ('root ::= ("ab" | "a") ("c" | "bc")', "(ab|a)(c|bc)"),
        ('root ::= [^a-b] ("b" | "\\x62c") {1,2}', "[^ab](b|bc){1,2}"),
        (
            'root ::= x{0,2} "a"\nx ::= (y | "b") y*\ny ::= y "c" | z\nz ::= "c" | y',
            "([bc]c*){0,2}a",
        ),
        ('root ::= "\\u0061" (\n  "b"\n  | the-end)*\nthe-end ::= "c"', "a[bc]*"),
    ],
)
def test_rules_allow_the_texts_that_they_say(rules, pattern) -> None:
    """All texts of up to four characters."""
    start = Matching(SMALL, Ebnf(rules))
    found = set()
    right = set()
    for text in ("".join(w) for n in range(5) for w in product("abc-", repeat=n)):
        num = start.matched.num_possible([*(SPELL[c] for c in text), EOS])
        found |= {text} if num == len(text) + 1 else set()
        right |= {text} if re.fullmatch(pattern, text) else set()
    assert found == right and right


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Ebnf("root ::= nobody"), "rule 'nobody' is not defined"),
        (Ebnf('root ::= "a"\nroot ::= "b"'), "rule 'root' must be defined once"),
        (Ebnf(r"root ::= [\d]"), r"got \d"),
        (Ebnf(r'root ::= "\ud83d"'), r"\ud83d is not a character"),
        (Ebnf("root ::= root"), "no text fits it"),
        (Json({"patternProperties": {"^a": {}}}), "patternProperties is not served"),
        (Regex("[a&&b]"), "no text fits it"),
        (Ebnf('root := "a"'), "cannot parse ':= \"a\"' at character 5"),
        (Regex("(a"), "unclosed group"),
        (Regex("(?=a)b"), "look-around"),
        (Json({"type": "nothing"}), "Invalid type: nothing"),
        (Json({"$ref": "#/nowhere"}), "nowhere"),
        # Names that are keywords elsewhere, and what an empty keyword evaluates.
        (Json({"dependentRequired": {"description": ["a"]}}), '"dependentRequired" is not se'),
    ],
)
def test_a_grammar_that_cannot_be_compiled_is_a_clear_error(grammar, reason) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)) as error:
        compile_source(source_of(grammar), tokenizer_of(SMALL))
    for inner in ("llguidance", "start:", "<state>"):
        assert inner not in str(error.value)


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("name", CASES)
def test_allowed_tokens_equal_those_of_trying_all_texts(name, limits) -> None:
    """Before `min_tokens` an end token can come only where nothing else can."""
    rng = random.Random(name)
    kwargs = LIMITS[limits]
    ends = {EOS, *kwargs.get("stop_token_ids", ())}
    for _ in range(5):
        ours = Matching(SMALL, CASES[name][0], **kwargs)
        while not ends.intersection(ours.outputs) and len(ours.outputs) < 20:
            allowed = may_come(TOKENIZER, texts_of(name), ours.outputs, kwargs)
            assert ours.allowed().tolist() == sorted(allowed), ours.outputs
            ours.outputs.append(rng.choice(allowed))


VALUES: list = [None, True, False, 0, 1, 10, "aa", "ab", "ba", "bb", "no", 0.5]
VALUES += [{}, *({name: value} for name in "ab" for value in VALUES)]


A_NUMBER: dict = {"enum": [0, 1]}
ARRAY: dict = {"type": "array", "items": A_NUMBER, "maxItems": 2}
RECORD: dict = {"type": "object", "properties": {"a": A_NUMBER}, "additionalProperties": False}
SAYS_NOTHING: list[dict] = [
    *({"propertyNames": names} for names in (True, {}, {"type": "string", "minLength": 0})),
    *({"not": False}, {"uniqueItems": False}, {"minItems": 0, "minLength": 0, "minProperties": 0}),
    {"$comment": "x", "title": "x", "description": "x", "examples": [1], "default": 1},
    {"readOnly": True, "deprecated": True, "$anchor": "x"},
    {"contentMediaType": "text/plain", "contentEncoding": "base64", "contentSchema": False},
]
NEVER: list[dict] = [
    {"anyOf": [{"not": {}}, A_NUMBER]},
    {"oneOf": [{"not": {"description": "x"}}, ARRAY, RECORD]},
    RECORD | {"properties": {"a": A_NUMBER, "b": {"not": True}}},
    RECORD | {"properties": {"a": {"not": {}}}},
    {"type": "object", "properties": {"a": {"not": {}}}, "additionalProperties": A_NUMBER},
    {"type": "array", "items": {"not": {}}},
    {"type": "array", "prefixItems": [A_NUMBER], "items": {"anyOf": [{"not": {}}]}},
    {"not": {}},
    RECORD | {"properties": {"a": {"not": {}}}, "required": ["a"]},
]


@pytest.mark.parametrize(
    "schema",
    [one | more for more in SAYS_NOTHING for one in (ARRAY, RECORD, {})] + NEVER,
    ids=json.dumps,
)
@pytest.mark.parametrize("is_inside", [False, True])
def test_keywords_that_say_nothing_or_never(schema: dict, is_inside: bool) -> None:
    """Such keywords have no effect, whatever library or program wrote them."""
    values = [*VALUES, [], [0], [0, 0], [0, 5], [[]], {"a": 0}, {"b": 0}, {"a": 0, "b": 0}]
    if is_inside:
        schema = {"type": "object", "required": ["b"], "properties": {"b": schema}}
        schema["additionalProperties"] = False
        values = [{"b": value} for value in values]
    is_right = jsonschema.Draft202012Validator(schema).is_valid
    right = [text for text in map(json.dumps, values) if is_right(json.loads(text))]
    try:
        ours = Matching(SMALL, Json(schema, 0))
    except ValueError as error:
        assert not right and re.search("no text fits|[Uu]nsatisfiable", str(error))
        return
    found = [t for t in map(json.dumps, values) if ours.takes([*(SPELL[c] for c in t), EOS])]
    assert found == right


@pytest.mark.parametrize("name", ["const", "enum", "default", "examples", "properties"])
@pytest.mark.parametrize("place", ["properties", "$defs", "definitions"])
def test_a_name_that_is_a_keyword_is_a_name(name: str, place: str) -> None:
    """Trap 84. A schema in that place is read as one; a value stays as it is."""
    inner = {"anyOf": [{"enum": ["a", "c"]}, {"not": {}}]}
    value = {"properties": {"x": inner}, "const": inner}
    schema: dict = {"type": "object", place: {name: inner}, "default": value}
    if place != "properties":
        schema["properties"] = {"x": {"$ref": f"#/{place}/{name}"}}
    schema |= {"required": [*schema["properties"]], "additionalProperties": False}
    name = schema["required"][0]
    ours = Matching(SMALL, Json(schema, 0))
    rng = random.Random(name)
    texts = {ours.draw(rng) for _ in range(20)}
    assert texts == {f'{{"{name}": "{value}"}}' for value in "ac"}
    assert json.loads(source_of(Json(schema)))["json"] == schema  # it was not changed


def test_an_unknown_format_is_a_remark_that_the_log_names(caplog) -> None:
    """At places of schemas: a property is *named* format here, and a value has a key of that name.
    All that the library knows are enforced."""
    inner = {"enum": ["a", "b"], "format": "letter-of-a-test"}
    schema = {"type": "object", "properties": {"format": inner}, "required": ["format"]}
    schema |= {"additionalProperties": False, "default": {"format": "letter-of-a-test"}}
    with caplog.at_level(logging.WARNING):
        matchings = [Matching(SMALL, Json(schema, 0)) for _ in range(2)]
    assert {m.draw(random.Random(i)) for i in range(9) for m in matchings} == {
        f'{{"format": "{letter}"}}' for letter in "ab"
    }
    assert {*caplog.messages} == {"ignoring the unknown format 'letter-of-a-test' of a schema"}
    for form in FORMATS:
        schema = {"type": "string", "format": form}
        assert rewritten(schema) == schema
        matcher = LLMatcher(tokenizer_of(BYTES), f"start: %json {json.dumps(schema)}")
        assert not matcher.is_error() and not matcher.consume_tokens([1 + b for b in b'"?!"']), form


@pytest.mark.parametrize("limits", LIMITS)
def test_guesses_are_matched_and_taken_back(limits) -> None:
    """A row for each draft token and one after them; after the first impossible draft, and after
    the end of the text, no row is constrained, and the matcher is as if there had been no drafts.
    Trap 65."""
    kwargs = LIMITS[limits]
    ours = Matching(SMALL, CASES["choice"][0], **kwargs)
    n, o, y, no = (SPELL[text] for text in ("n", "o", "y", "no"))
    ours.outputs = [n]
    before = ours.allowed().tolist()
    for drafts, num_possible in (([o, EOS], 2), ([o, y, o], 1), ([y], 0), ([o], 1), ([], 0)):
        bits = ours.bits(1 + len(drafts))
        ours.matched.fill(bits, 0, drafts)
        assert ours.matched.num_possible(drafts) == num_possible
        for i in range(1 + len(drafts)):
            if i > num_possible or EOS in drafts[:i]:
                assert (bits[i] == -1).all()
                continue
            allowed = may_come(TOKENIZER, texts_of("choice"), [n, *drafts[:i]], kwargs)
            assert bits_of(bits[i : i + 1], ours.vocab_size).tolist() == sorted(allowed)
        assert ours.allowed().tolist() == before
    ours.outputs.append(no)  # what no mask had allowed: of this request nothing more may come
    assert ours.allowed().tolist() == []


def test_a_draft_at_which_the_library_gives_up_ends_no_text() -> None:
    """The allowed tokens without drafts are the same after them. The row after such a draft is
    unknown: no token is allowed."""
    heavy = "(" * 16 + "a" + "{1,99})" * 16
    grammar = Regex(f"c?x(cc|{heavy})")
    tokens = tokenizer_of(SMALL)
    texts = [compile_source(source_of(one), tokens) for one in (grammar, Regex("ab"))]
    matchers = [beginning_of(tokens, text).matcher for text in texts]
    ours = Matching(SMALL, grammar)
    ours.outputs = [SPELL["x"]]
    bits = ours.bits(9)
    ours.follow()
    ours.matched.fill(bits, 0, [SPELL["a"]] * 8)
    is_said = bits.any(1).tolist()
    assert is_said == sorted(is_said, reverse=True) and 1 <= sum(is_said) < 8, "it gave up"
    is_kept = [beginning_of(tokens, text).matcher is m for text, m in zip(texts, matchers)]
    assert is_kept == [False, True], "the next one begins anew, and with another grammar as before"
    ours.outputs += [SPELL["c"]]
    assert ours.allowed().tolist() == [SPELL["c"]]
    ours.matched.num_possible([SPELL["c"]] * 3)
    ours.outputs += [SPELL["c"]]
    assert ours.allowed().tolist() == [EOS]


@pytest.mark.parametrize(
    ("rules", "can_end"),
    [
        ('root ::= s\ns ::= s s s | "a"', True),
        ('root ::= "a" root | "a"', True),
        ('root ::= "a"*', False),
        ('root ::= "a" root "b" | "c"', False),
    ],
)
def test_ambiguous_rules_reach_a_limit(rules, can_end) -> None:
    """The limit is reached before a token takes tenths of a second, which would delay all other
    requests. It is the same token on every machine, because it is counted. Rules with one reading,
    or few, have no limit."""
    ours = Matching(SMALL, Ebnf(rules))
    a = TOKENIZER.encode("a")[0]
    matcher = ours.matched.beginning.matcher
    while len(ours.outputs) < 1000 and a in ours.allowed():
        ours.outputs.append(a)
    assert (len(ours.outputs) < 1000) == can_end
    assert (ours.matched.gave_up == TOO_MANY_WAYS) == can_end
    assert ours.matched.beginning.matcher is matcher, "it is compiled once"
    assert 30 <= len(ours.outputs) <= 500 or not can_end


def test_thousands_of_alternatives_are_compiled_quickly() -> None:
    with pytest.raises(ValueError, match="too big"):  # row by row it would take seconds
        Matching(SMALL, Ebnf("root ::= " + '("a"|"b"|"") ' * 9000))
    many = {f"p{i}": {"type": "integer"} for i in range(700)}
    for grammar, text in (
        (Choice([f"label {i}" for i in range(3000)]), "label 2999"),
        (Json({"type": "object", "properties": many}, 0), '{"p1": 5, "p699": 1}'),
    ):
        ours = Matching(SMALL, grammar)
        for token_id in (SPELL[character] for character in text):
            assert token_id in ours.allowed()
            ours.outputs.append(token_id)
        assert EOS in ours.allowed()


def test_rules_and_schemas_may_lead_to_each_other_for_long() -> None:
    """The library calls itself for each: a usual stack would end, and the process with it."""
    rules = "".join(f'r{i} ::= "a" r{i + 1}\n' for i in range(3000))
    found: dict = {"type": "boolean"}
    schemas = {"60": found}
    for i in reversed(range(60)):
        found = {"$ref": f"#/$defs/{i + 1}"}
        for _ in range(30):
            found = {"type": "array", "items": found}
        schemas[str(i)] = found
    for grammar, first in (
        (Ebnf(f'root ::= r0\n{rules}r3000 ::= "b"'), "a"),
        (Json({"$ref": "#/$defs/0", "$defs": schemas}), "["),
    ):
        ours = Matching(SMALL, grammar)
        (token,) = TOKENIZER.encode(first)
        ours.outputs = [token] * 100
        assert token in ours.allowed()
    many = "a" * 200_000
    too_many = Json({"anyOf": [{}] * 20_000, "description": many})
    for grammar in (Ebnf(f'root ::= "{many}"'), Json({"const": many}), Regex(many), too_many):
        with pytest.raises(ValueError, match="grammar must have at most 200,000"):
            source_of(grammar)
    assert source_of(Choice([many]))
    with pytest.raises(ValueError, match="grammar must have at most 2,000,000"):
        source_of(Choice([many] * 10))


def test_special_tokens_and_those_that_end_texts_are_no_text() -> None:
    """A checkpoint's EOS may be a plain token of its tokenizer, which has its text in the file."""
    plain = TOKENIZER.vocab_size - 1
    assert plain not in TOKENIZER.special_ids and TOKENIZER.token_bytes(plain)
    vocabulary = Vocabulary.of(TOKENIZER, TOKENIZER.vocab_size + 3, [EOS, plain, 500])
    assert vocabulary.eos_token_ids == (EOS, plain) and not any(vocabulary.token_bytes[:2])
    assert not vocabulary.token_bytes[plain]
    allowed = Matching(vocabulary, Regex(r"(?s).*")).allowed().tolist()
    assert allowed == list(range(1, TOKENIZER.vocab_size))


class Held:
    """A compiler whose library works on grammars with an `x` until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = SimpleQueue[str]()
        self.go_on = Event()
        monkeypatch.setattr(grammar_compiler, "compile_source", self.compile)
        self.compiler = GrammarCompiler(SMALL)

    def compile(self, source: str, tokenizer: LLTokenizer) -> str:
        self.begun.put(text := json.loads(source)["regex"])
        assert "x" not in text or self.go_on.wait(60)
        return compile_source(source, tokenizer)

    def submit(self, text: str) -> GrammarJob:
        return self.compiler.submit(source_of(Regex(text)))


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    held = Held(monkeypatch)
    yield held
    held.go_on.set()
    held.compiler.close()


def test_nothing_is_compiled_for_a_disconnected_client(held) -> None:
    """Trap 87. Neither what waits nor what has begun holds up the next grammar."""
    begun, waits = held.submit("x"), held.submit("a")
    assert held.begun.get(timeout=60) == "x"
    assert waits.cancel() and begun.cancel()
    again = held.submit("a")
    assert again is not waits and held.submit("a") is again
    assert "start: /a/" in again.result(60)
    assert "start: /b/" in held.submit("b").result(60)
    assert [held.begun.get(timeout=60) for _ in range(2)] == ["a", "b"]
    assert not held.go_on.is_set(), "the library still works on the first one"


@pytest.mark.parametrize(("end", "other_end"), [("", "c" * SHORT), ("c" * SHORT, "")])
def test_three_that_were_given_up_hold_up_no_other_and_a_fourth_does(held, end, other_end) -> None:
    """Trap 87. The next one begins as soon as one of them has ended. Of long grammars a fourth
    holds up only long ones, and of short ones only short ones."""
    for i in range(3):
        begun = held.submit("x" * (i + 1) + end)
        held.begun.get(timeout=60)
        begun.cancel()
        assert f"start: /{'a' * i}b{end}/" in held.submit("a" * i + "b" + end).result(30)
        held.begun.get(timeout=60)
    last = held.submit("xxxx" + end)
    held.begun.get(timeout=60)
    waits = held.submit("c" + end)
    assert last.cancel() and not wait([waits], 0.1).done
    assert f"start: /c{other_end}/" in held.submit("c" + other_end).result(60)
    assert not waits.done()
    held.go_on.set()
    assert f"start: /c{end}/" in waits.result(60)


def test_a_grammar_gets_ten_seconds_of_the_compiler(held, monkeypatch) -> None:
    """Trap 87. Its own seconds: not those in which others were compiled."""
    assert grammar_compiler.TIMEOUT_S == 10
    monkeypatch.setattr(grammar_compiler, "TIMEOUT_S", 0.1)
    fail = GrammarJob.set_exception

    def fail_and_wait_longer(job: GrammarJob, error: BaseException) -> None:
        """For the next one, which may take more than that on a busy machine."""
        monkeypatch.setattr(grammar_compiler, "TIMEOUT_S", 60.0)
        fail(job, error)

    monkeypatch.setattr(GrammarJob, "set_exception", fail_and_wait_longer)
    slow, next_one = held.submit("x"), held.submit("a")
    with pytest.raises(ValueError, match="cannot compile: compiling takes longer than 0 s"):
        slow.result(60)
    assert "start: /a/" in next_one.result(60)
    assert held.submit("x") is not slow, "a failure is not kept"


def test_the_least_recently_wanted_go_first_failures_too(held, monkeypatch) -> None:
    first, second = held.submit("a"), held.submit("b")
    monkeypatch.setattr(grammar_compiler, "KEPT", 3 * (4 * len(source_of(Regex("a"))) + 4110))
    assert held.submit("a") is first
    held.submit("c").result(60)
    held.submit("d").result(60)  # one too many is there
    assert held.submit("a") is first and held.submit("b") is not second
    for i in range(20):
        with pytest.raises(ValueError, match="cannot compile"):
            held.submit(f"({i}").result(60)
    waiting = [held.submit(f"x{i}") for i in range(20)]
    assert [held.submit(f"x{i}") for i in range(20)] == waiting, "requests wait for them"
    held.go_on.set()
    waiting[-1].result(60)
    held.submit("a")
    assert len(held.compiler._kept) <= 3


@pytest.mark.parametrize("vocab_size", [70, 64, 45])  # of 64 bits
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_forbidden_logits_are_minus_infinity_and_no_other_changes(dtype, vocab_size) -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, vocab_size, dtype=dtype)
    before = logits.clone()
    rng = random.Random(0)
    allowed = [{0, 31, 32, 63}, {rng.randrange(64) for _ in range(20)}]
    words = np.zeros((2, 2), dtype=np.uint32)
    for row, ids in enumerate(allowed):
        for i in ids:
            words[row, i // 32] |= np.uint32(1 << i % 32)
    changed = forbid(logits, torch.tensor([2, 0]), torch.from_numpy(words.view(np.int32)))
    assert torch.equal(logits, before), "they may be a graph's own"
    for row, ids in ((2, allowed[0]), (0, allowed[1])):
        for i in range(vocab_size):
            assert changed[row, i] == (before[row, i] if i in ids else float("-inf"))
    assert torch.equal(changed[[1, 3]], before[[1, 3]])


def test_equal_grammars_have_one_source_and_others_have_others() -> None:
    equal: list = [(Json(SCHEMA), Json(json.dumps(SCHEMA))), (Json(SCHEMA), {"json": SCHEMA})]
    equal += [(Choice(["a"]), {"choice": ["a"], "regex": None}), (Ebnf("x"), {"grammar": "x"})]
    equal += [(Json(), {"json_object": True})]
    assert all(source_of(one) == source_of(other) for one, other in equal)
    different = [Json(), Json(SCHEMA), Json(SCHEMA, 0), Regex("a"), Choice(["a"]), Ebnf("a")]
    assert len({source_of(grammar) for grammar in different}) == len(different)
