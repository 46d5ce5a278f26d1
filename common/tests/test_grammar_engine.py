"""Grammars in an engine: each request gets the highest of the tokens that may follow, what is drawn
is drawn from the law that they leave, and what goes wrong ends one request. In any company and with
every feature: the array (`equivalence.py`)."""

from __future__ import annotations

import json
import math
import re
import threading
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from bounded_loops import as_long_as
from common.engine import LLMEngine
from common.features.grammars import grammar_compiler
from common.features.grammars.lark_text import TOO_MANY_WAYS
from common.requests.output_processor import RequestOutput
from common.requests.tokenizer import Tokenizer
from common.tests.engine_oracle import checked_engine
from common.tests.every_kind import must_be_drawn_from
from common.tests.grammar_cases import CASES, EOS, LIMITS, may_follow, small_tokenizer, texts_of
from common.tests.model_cases import by_transformers
from common.tests.small_models import subject
from grammars import Choice, Ebnf, Json, Regex
from request import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")
TOKENIZER = small_tokenizer()
INDICES = (0, 1, 8, 15)
NUM_TOKENS = 10
DRAFTS = {"method": "draft", "num_spec_tokens": 3, "adaptive": False}


def params_of(name: str | None, **how: Any) -> SamplingParams:
    """Greedy, within a grammar."""
    how = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": name is None} | how
    return SamplingParams(grammar=None if name is None else CASES[name][0], **how)


def right(name: str | None, i: int, limits: str = "none") -> list[int]:
    return subject("family").within(None, name, INDICES[i], NUM_TOKENS, limits)


@pytest.fixture
def prompts(family_oracle) -> list[list[int]]:
    return [family_oracle.prompts[i] for i in INDICES]


def make_engine(draft=None, **config) -> LLMEngine:
    return checked_engine(
        subject("family").ending, draft, TOKENIZER, **{"num_blocks": 400} | config
    )


def test_each_token_is_the_highest_of_those_that_may_follow(prompts) -> None:
    """Each prompt with each grammar and with none, again from the cache, with other limits, and as
    two samples."""
    engine = make_engine()
    pairs = [(i, name) for i in range(4) for name in CASES]
    for limits, how in LIMITS.items():
        asked = [params_of(name, n=2, **how) for _, name in pairs]
        found = engine.generate_batch([prompts[i] for i, _ in pairs], asked).values()
        for (i, name), output in zip(pairs, found, strict=True):
            assert [c.token_ids for c in output.outputs] == [right(name, i, limits)] * 2
            if limits == "none" and output.outputs[0].finish_reason == "stop":
                assert output.outputs[0].text.encode() in texts_of(name)
    engine.close()


def test_the_law_is_that_of_the_model_among_what_may_follow(draft, family_oracle, prompts) -> None:
    """Exactly: each text's probability is a product over its tokens. Guesses are accepted and
    refused by chance, and change nothing; impossible ones are cut before they are verified."""
    model = by_transformers(family_oracle.path, torch.float64)
    law: dict[tuple[int, ...], float] = {}

    @torch.inference_mode()
    def spread(outputs: list[int], share: float) -> None:
        if outputs and outputs[-1] == EOS:
            law[tuple(outputs)] = share
            return
        allowed = may_follow(TOKENIZER, texts_of("choice"), outputs)
        logits = model(torch.tensor([prompts[1] + outputs])).logits[0, -1]
        for token, p in zip(allowed, (logits[allowed] / 3).softmax(0).tolist(), strict=True):
            if share * p > 1e-4:
                spread([*outputs, token], share * p)

    spread([], 1.0)
    assert len(law) > 4 and math.isclose(sum(law.values()), 1, abs_tol=0.01)
    for how, cuts in ((None, True), (DRAFTS, True), (DRAFTS, False)):
        engine = make_engine(draft, speculative=how, check_invariants=False)
        if not cuts:
            engine.core.runner.num_possible = lambda _, drafts: len(drafts)
        params = params_of("choice", temperature=3.0, n=400)
        (output,) = engine.generate_batch([prompts[1]], params).values()
        found = Counter(tuple(completion.token_ids) for completion in output.outputs)
        must_be_drawn_from(law, found)
        stats = engine.stats()
        assert (stats.num_accepted_tokens > 0) == (how is not None)
        assert (stats.num_accepted_tokens < stats.num_drafted_tokens) == (not cuts)


def test_what_shapes_the_law_sees_what_the_grammar_has_left(draft, prompts) -> None:
    """Else the one token that is kept would be forbidden: guesses or not, that is an error."""
    shapes = dict(top_k=1), dict(top_p=1e-9), dict(min_p=1.0)
    for how in (None, DRAFTS):
        engine = make_engine(draft, speculative=how)
        params = [params_of(n, temperature=1.0, **shape) for shape in shapes for n in CASES]
        outputs = engine.generate_batch(prompts * len(shapes), params).values()
        found = [output.outputs[0].token_ids for output in outputs]
        assert found == [right(name, i) for i, name in enumerate(CASES)] * len(shapes)
        engine.close()


def test_json_fits_its_schema_and_has_few_blanks(prompts) -> None:
    """Trap 66."""
    import jsonschema  # not above: it takes seconds, and every process collects this file

    integers = {"type": "array", "items": {"type": "integer"}, "maxItems": 3}
    kinds = {"a": integers, "b": {"enum": ["x", "yes", 7]}, "c": {"type": "string", "maxLength": 9}}
    schema = dict(type="object", properties=kinds, required=[*kinds], additionalProperties=False)
    grammars = [Json(schema), Json(json.dumps(schema)), {"json": schema}] * 4
    how = dict(temperature=2, max_tokens=150)
    params = [SamplingParams(seed=i, grammar=g, **how) for i, g in enumerate(grammars)]
    num_whole = 0
    for output in make_engine().generate_batch(prompts * 3, params).values():
        (completion,) = output.outputs
        assert not re.search(r"\s{3}", completion.text)
        if completion.finish_reason == "stop":
            jsonschema.validate(json.loads(completion.text), schema)
            num_whole += 1
    assert num_whole >= 8


# -- what goes wrong


@pytest.mark.parametrize("how", [dict(overlap_scheduling=True), dict(speculative=DRAFTS)], ids=str)
def test_who_is_wrong_or_can_say_nothing_more_ends_alone_with_the_reason(
    how, draft, prompts
) -> None:
    engine = make_engine(draft, **how)
    q, x, y = (TOKENIZER.encode(letter)[0] for letter in "qxy")
    heavy = "(" * 16 + "a" + "{1,99})" * 16
    why = ": no token may come next"
    rules = dict(grammar=Regex("ab*"), allowed_token_ids=[x], bad_words=[[q]])
    reasons: list[tuple[dict, str]] = [
        *((dict(grammar=g), "grammar: cannot compile: ") for g in (Regex("(a"), Regex("(?=a)b"))),
        (dict(grammar=Json({"type": "nothing"}), n=2), "grammar: cannot compile: "),
        (dict(grammar=Ebnf("root ::= nobody")), "grammar: cannot compile: "),
        (dict(grammar=Choice(["aß", "aé"])), f"grammar{why}"),  # no token has the letter
        (rules, f"allowed_token_ids and grammar{why}"),
        (dict(grammar=Regex("xy"), bad_words=[[x, y], [q]]), f"bad_words and grammar{why}"),
        (dict(grammar=Regex(f"x{heavy}")), "grammar (lexer error: too many expressions constr"),
    ]
    params = [SamplingParams(**{"temperature": 0, **how}) for how, _ in reasons]
    asked = [*params, params_of("regex"), params_of(None)]
    outputs = list(engine.generate_batch([prompts[0]] * len(asked), asked).values())
    for output, (_, reason) in zip(outputs, reasons):
        assert {c.finish_reason for c in output.outputs} == {"error"}
        assert output.metrics.finish_detail.startswith(reason)
    assert [o.outputs[0].token_ids for o in outputs[-2:]] == [right("regex", 0), right(None, 0)]
    engine.close()


UNMEANT: list[tuple[dict, str]] = [
    (dict(grammar=Regex("a"), ignore_eos=True), "ignore_eos must"),
    *((dict(grammar=g), "grammar must") for g in ("a+", Regex(""), {}, {"structural_tag": "x"})),
    (dict(grammar={"json": {}, "regex": "a"}), "grammar must"),
    *((dict(grammar=Choice(wrong)), "choice must") for wrong in ([], "yes")),
    (dict(grammar=Choice(["\ud800"])), "unpaired surrogates"),
    *((dict(grammar=Json(wrong)), "schema must") for wrong in ("{", [1])),
    (dict(grammar=Json({}, max_whitespace=-1)), "max_whitespace"),
]


def test_what_can_not_be_meant_is_refused() -> None:
    engine = make_engine()
    for how, why in UNMEANT:
        with pytest.raises(ValueError, match=why):
            engine.add_request("a", [5], SamplingParams(**how))
    assert not engine.has_unfinished_requests()


def test_without_what_it_needs_it_is_refused(monkeypatch) -> None:
    params = SamplingParams(grammar=Regex("a"), max_tokens=9)
    loaded = subject("family").ending
    listed = replace(loaded, generation_eos_token_ids=())
    endless = checked_engine(listed, tokenizer=Tokenizer(TOKENIZER.backend), num_blocks=9)
    bare = checked_engine(loaded, num_blocks=9)
    lacking = make_engine()
    package = r"pip install 'vllm-from-scratch\[grammar\]'"
    for engine, why in ((bare, "a tokenizer"), (endless, "no EOS token"), (lacking, package)):
        if engine is lacking:
            monkeypatch.setattr("common.requests.input_processor.find_spec", lambda name: None)
        with pytest.raises(ValueError, match=why):
            engine.add_request("a", [5], params)


def test_what_would_take_for_ever_ends_in_an_error_soon(prompts, monkeypatch) -> None:
    """The library counts what it does: no clock decides, and no process has to be ended. Meanwhile
    nobody is held up, and who waits may go, and so may the engine."""
    engine = make_engine()
    goes_on = threading.Event()
    compile_source = grammar_compiler.compile_source

    def compile(source: str, tokenizer: object) -> str:
        assert goes_on.wait(60)
        return compile_source(source, tokenizer)

    monkeypatch.setattr(grammar_compiler, "compile_source", compile)
    rules = Ebnf('root ::= s\ns ::= s s | s s s | "a"')
    a = TOKENIZER.encode("a")
    endless = {
        "regex": Regex("(" * 30 + "a" + "{1,99})" * 30),
        "choices": Regex("(a|b)*a(a|b){900}c"),
        "ebnf": Ebnf("root ::= " + "(" * 12 + "[ab]*" + ")*" * 12 + ' "c"'),
    }
    for name, grammar in endless.items():
        engine.add_request(name, prompts[0], SamplingParams(temperature=0, grammar=grammar))
    ways = SamplingParams(temperature=0, max_tokens=1000, grammar=rules, allowed_token_ids=a)
    engine.add_request("ambiguous", prompts[0], ways)
    engine.add_request("aborted", prompts[0], params_of("choice"))
    engine.add_request("free", prompts[0], params_of(None))
    outputs: dict[str, RequestOutput] = {}
    for _ in as_long_as(lambda: "free" not in outputs, max_rounds=1000):
        outputs |= {o.request_id: o for o in engine.step() if o.finished}
    engine.step()  # nobody can do anything, and that is no fault
    assert outputs.keys() == {"free"}
    engine.abort_request("aborted")
    goes_on.set()
    for _ in as_long_as(engine.has_unfinished_requests, max_rounds=10**9):
        outputs |= {o.request_id: o for o in engine.step() if o.finished}
    assert outputs["free"].outputs[0].token_ids == right(None, 0)
    ambiguous = outputs["ambiguous"]
    assert set(ambiguous.outputs[0].token_ids) == set(a)
    assert f"grammar ({TOO_MANY_WAYS})" in str(ambiguous.metrics.finish_detail)
    assert outputs["regex"].outputs[0].finish_reason == "error" and outputs.keys() >= {*endless}
    goes_on.clear()
    engine.add_request("late", prompts[0], params_of("nested"))
    engine.close()
    goes_on.set()
