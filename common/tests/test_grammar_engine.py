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
from transformers import Qwen3ForCausalLM

from bounded_loops import as_long_as
from common.engine import EngineConfig, LLMEngine
from common.features.grammars import grammar_compiler
from common.features.grammars.lark_text import TOO_MANY_WAYS
from common.requests.tokenizer import Tokenizer
from common.tests.engine_oracle import checked_engine
from common.tests.every_kind import must_be_drawn_from
from common.tests.grammar_cases import (
    CASES,
    EOS,
    LIMITS,
    may_follow,
    small_tokenizer,
    texts_of,
)
from common.tests.small_models import subject
from grammars import Choice, Ebnf, Json, Regex
from request import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")
TOKENIZER = small_tokenizer()
INDICES, NUM_TOKENS = (0, 1, 8, 15), 10
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
    engine, pairs = make_engine(), [(i, name) for i in range(4) for name in CASES]
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
    prompt, texts = prompts[1], texts_of("choice")
    model = Qwen3ForCausalLM.from_pretrained(family_oracle.path, dtype=torch.float64).eval()
    law: dict[tuple[int, ...], float] = {}

    def spread(outputs: list[int], share: float) -> None:
        if outputs and outputs[-1] == EOS:
            law[tuple(outputs)] = share
            return
        allowed = may_follow(TOKENIZER, texts, outputs)
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + outputs])).logits[0, -1]
        for token, p in zip(allowed, (logits[allowed] / 3).softmax(0).tolist(), strict=True):
            if share * p > 1e-4:
                spread([*outputs, token], share * p)

    spread([], 1.0)
    assert len(law) > 4 and math.isclose(sum(law.values()), 1, abs_tol=0.01)
    for how, cuts in ((None, True), (DRAFTS, True), (DRAFTS, False)):
        engine = make_engine(draft, speculative=how, check_invariants=False)
        if not cuts:
            engine.speculation.proposer = engine.speculation.proposer.proposer
        params = params_of("choice", temperature=3.0, n=500)
        (output,) = engine.generate_batch([prompt], params).values()
        found = Counter(tuple(completion.token_ids) for completion in output.outputs)
        must_be_drawn_from(law, found)
        stats = engine.stats()
        assert (stats.num_accepted_tokens > 0) == (how is not None)
        assert (stats.num_accepted_tokens < stats.num_drafted_tokens) == (not cuts)
        engine.close()


@pytest.mark.parametrize("shape", [dict(top_k=1), dict(top_p=1e-9), dict(min_p=1.0)], ids=str)
def test_what_shapes_the_law_sees_what_the_grammar_has_left(shape, draft, prompts) -> None:
    """Else the one token that is kept would be forbidden: guesses or not, that is an error."""
    for how in (None, DRAFTS):
        engine = make_engine(draft, speculative=how)
        params = [params_of(name, temperature=1.0, **shape) for name in CASES]
        outputs = engine.generate_batch(prompts, params).values()
        found = [output.outputs[0].token_ids for output in outputs]
        assert found == [right(name, i) for i, name in enumerate(CASES)]
        engine.close()


def test_json_fits_its_schema_and_has_few_blanks(prompts) -> None:
    """Trap 66."""
    import jsonschema  # not above: it takes seconds, and every process collects this file

    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
            "b": {"enum": ["x", "yes", 7]},
            "c": {"type": "string", "maxLength": 9},
        },
        "required": ["a", "b", "c"],
        "additionalProperties": False,
    }
    engine, num_whole = make_engine(), 0
    for seed, grammar in enumerate([Json(schema), Json(json.dumps(schema)), {"json": schema}] * 4):
        params = SamplingParams(temperature=2, max_tokens=150, seed=seed, grammar=grammar)
        (output,) = engine.generate_batch([prompts[seed % 4]], params).values()
        completion = output.outputs[0]
        assert completion.finish_reason in ("stop", "length")
        assert not re.search(r"\s{3}", completion.text)
        if completion.finish_reason == "stop":
            jsonschema.validate(json.loads(completion.text), schema)
            num_whole += 1
    assert num_whole >= 8
    engine.close()


# -- what goes wrong


@pytest.mark.parametrize(
    "config",
    [{}, dict(overlap_scheduling=True), dict(speculative=DRAFTS, block_size=3)],
    ids=["as it is", "ahead", "draft"],
)
def test_who_is_wrong_or_can_say_nothing_more_ends_alone_with_the_reason(
    config, draft, prompts
) -> None:
    engine = make_engine(draft, **config)
    q, x, y = (TOKENIZER.encode(letter)[0] for letter in "qxy")
    heavy, why = "(" * 16 + "a" + "{1,99})" * 16, ": no token may come next"
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


@pytest.mark.parametrize(
    ("how", "why"),
    [
        (dict(ignore_eos=True), "ignore_eos must"),
        (dict(grammar="a+"), "grammar must"),
        (dict(grammar=Regex("")), "grammar must"),
        (dict(grammar=Choice([])), "choice must"),
        (dict(grammar=Choice("yes")), "choice must"),
        (dict(grammar=Choice(["\ud800"])), "unpaired surrogates"),
        (dict(grammar=Json("{")), "schema must"),
        (dict(grammar=Json([1])), "schema must"),
        (dict(grammar=Json({}, max_whitespace=-1)), "max_whitespace"),
        (dict(grammar={"structural_tag": "x"}), "grammar must"),
        (dict(grammar={"json": {}, "regex": "a"}), "grammar must"),
        (dict(grammar={}), "grammar must"),
    ],
)
def test_what_can_not_be_meant_is_refused(how, why) -> None:
    engine = make_engine()
    with pytest.raises(ValueError, match=why):
        engine.add_request("a", [5], SamplingParams(**{"grammar": Regex("a"), **how}))
    assert not engine.has_unfinished_requests()


def test_without_what_it_needs_it_is_refused(monkeypatch) -> None:
    params, config = SamplingParams(grammar=Regex("a"), max_tokens=9), EngineConfig(num_blocks=9)
    loaded = subject("family").ending
    listed = replace(loaded, generation_eos_token_ids=())
    endless = LLMEngine(config, loaded=listed, tokenizer=Tokenizer(TOKENIZER.backend))
    bare = LLMEngine(config, loaded=loaded)
    for engine, why in ((bare, "without a tokenizer"), (endless, "no EOS token")):
        with pytest.raises(ValueError, match=why):
            engine.add_request("a", [5], params)
    monkeypatch.setattr("common.requests.input_processor.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'vllm-from-scratch\[grammar\]'"):
        make_engine().add_request("a", [5], params)


def test_a_grammar_that_is_slow_to_compile_holds_up_nobody(prompts, monkeypatch) -> None:
    """And who waits for one may go at any time, and so may the engine."""
    engine, goes_on = make_engine(), threading.Event()
    compile_source = grammar_compiler.compile_source

    def compile(source: str, tokenizer: object) -> str:
        assert goes_on.wait(60)
        return compile_source(source, tokenizer)

    monkeypatch.setattr(grammar_compiler, "compile_source", compile)
    for name in ("regex", "choice", None):
        engine.add_request(name or "free", prompts[0], params_of(name))
    done: dict[str, list[int]] = {}

    def step_while(is_to_go_on) -> None:
        for _ in as_long_as(is_to_go_on, max_rounds=1000):
            done.update({o.request_id: o.outputs[0].token_ids for o in engine.step() if o.finished})

    step_while(lambda: "free" not in done)
    engine.step()  # nobody can do anything, and that is no fault
    engine.abort_request("choice")
    goes_on.set()
    step_while(engine.has_unfinished_requests)
    assert done == {"choice": []} | {n or "free": right(n, 0) for n in ("regex", None)}
    goes_on.clear()
    engine.add_request("late", prompts[0], params_of("nested"))
    engine.close()
    goes_on.set()


def test_what_would_take_for_ever_ends_in_an_error_soon(prompts) -> None:
    """The library counts what it does: no clock decides, and no process has to be ended."""
    endless = [
        Regex("(" * 30 + "a" + "{1,99})" * 30),
        Regex("(a|b)*a(a|b){900}c"),
        Ebnf("root ::= " + "(" * 12 + "[ab]*" + ")*" * 12 + ' "c"'),
    ]
    params = [SamplingParams(temperature=0, grammar=g) for g in endless]
    rules, a = Ebnf('root ::= s\ns ::= s s | s s s | "a"'), TOKENIZER.encode("a")
    ways = SamplingParams(temperature=0, max_tokens=1000, grammar=rules, allowed_token_ids=a)
    engine = make_engine()
    outputs = engine.generate_batch([prompts[0]] * 5, [*params, ways, params_of(None)]).values()
    *bad, ambiguous, free = outputs
    assert free.outputs[0].token_ids == right(None, 0)
    assert set(ambiguous.outputs[0].token_ids) == set(a)
    assert f"grammar ({TOO_MANY_WAYS})" in str(ambiguous.metrics.finish_detail)
    assert bad[0].outputs[0].finish_reason == "error", bad[0].metrics
    engine.close()
