"""Grammars in an engine: in any company and with every feature, each request gets the highest of
the tokens that may follow, and what is drawn is drawn from the law that they leave."""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections import Counter
from dataclasses import replace

import pytest
import torch
from transformers import Qwen3ForCausalLM

from bounded_loops import as_long_as
from common.engine import EngineConfig, LLMEngine
from common.features.grammars import grammar_compiler
from common.features.grammars.lark_text import TOO_MANY_WAYS
from common.models.loader import LoadedModel
from common.requests.tokenizer import Tokenizer
from common.tests.claims import (
    AHEAD,
    BOUND,
    DRAFT_3,
    GRAPHS,
    INDICES,
    OVERLAP,
    bound_params,
    cases_of,
)
from common.tests.engine_oracle import checked_engine
from common.tests.every_kind import must_be_drawn_from
from common.tests.grammar_cases import CASES, EOS, may_follow, small_tokenizer, texts_of
from common.tests.small_models import subject
from grammars import Choice, Ebnf, Json, Regex
from request import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")
NUM_TEXTS = 500  # drawn
TOKENIZER = small_tokenizer()


@pytest.fixture
def compiled(monkeypatch) -> list[str]:
    """The sources that are compiled."""
    sources: list[str] = []
    compile_source = grammar_compiler.compile_source

    def compile(source: str, tokenizer: object) -> str:
        sources.append(source)
        return compile_source(source, tokenizer)

    monkeypatch.setattr(grammar_compiler, "compile_source", compile)
    return sources


@pytest.fixture
def loaded() -> LoadedModel:
    return subject("family").ending


def prompts_of(family_oracle) -> list[list[int]]:
    return [family_oracle.prompts[i] for i in INDICES]


def make_engine(loaded, draft=None, **config) -> LLMEngine:
    return checked_engine(loaded, draft, TOKENIZER, **{"num_blocks": 400} | config)


@cases_of(BOUND)
def test_each_token_is_the_highest_of_those_that_may_follow(claim, model, number, compiled) -> None:
    claim.hold(model, number)
    assert len(compiled) == len(set(compiled)) == len(CASES), "one source is compiled twice"


def test_the_law_is_that_of_the_model_among_what_may_follow(loaded, draft, family_oracle) -> None:
    """Exactly: each text's probability is a product over its tokens. Guesses are accepted and
    refused by chance, and change nothing."""
    prompt, texts = prompts_of(family_oracle)[1], texts_of("choice")
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
    drafts = {"method": "draft", "num_spec_tokens": 3, "adaptive": False}
    for how, cuts in ((None, True), (drafts, True), (drafts, False)):
        engine = make_engine(loaded, draft, speculative=how, check_invariants=False)
        if not cuts:
            engine.speculation.proposer = engine.speculation.proposer.proposer
        params = bound_params("choice", temperature=3.0, n=NUM_TEXTS)
        (output,) = engine.generate_batch([prompt], params).values()
        found = Counter(tuple(completion.token_ids) for completion in output.outputs)
        must_be_drawn_from(law, found)
        stats = engine.stats()
        assert (stats.num_accepted_tokens > 0) == (how is not None)
        assert (stats.num_accepted_tokens < stats.num_drafted_tokens) == (not cuts)
        engine.close()


def test_logprobs_are_those_among_what_may_follow(loaded, family_oracle) -> None:
    engine = make_engine(loaded)
    prompt = prompts_of(family_oracle)[0]
    (output,) = engine.generate_batch([prompt], bound_params("choice", logprobs=5)).values()
    completion, outputs = output.outputs[0], []
    for entry, token in zip(completion.logprobs, completion.token_ids, strict=True):
        allowed = may_follow(TOKENIZER, texts_of("choice"), outputs)
        finite = {t: p for t, p in entry.top.items() if p > -math.inf}
        assert finite.keys() <= set(allowed)
        if len(allowed) <= 5:
            assert math.isclose(sum(map(math.exp, finite.values())), 1, rel_tol=1e-9)
        outputs.append(token)
    engine.close()


def test_json_fits_its_schema_and_has_few_blanks(loaded, family_oracle) -> None:
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
    engine, prompts = make_engine(loaded), prompts_of(family_oracle)
    num_whole = 0
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


def test_a_wrong_grammar_ends_its_request_and_no_other(loaded, family_oracle, expected) -> None:
    engine, prompts = make_engine(loaded), prompts_of(family_oracle)
    wrong = [Regex("(a"), Json({"type": "nothing"}), Ebnf("root ::= nobody"), Regex("(?=a)b")]
    params = [
        bound_params("regex"),
        *(SamplingParams(grammar=g, n=2) for g in wrong),
        bound_params(None),
    ]
    outputs = list(engine.generate_batch([prompts[0]] * len(params), params).values())
    assert outputs[0].outputs[0].token_ids == expected["regex"][0]
    assert outputs[-1].outputs[0].token_ids == expected[None][0]
    for output in outputs[1:-1]:
        assert {c.finish_reason for c in output.outputs} == {"error"}
        assert output.metrics.finish_detail.startswith("grammar: cannot compile: ")
    engine.check_invariants()
    assert not engine.has_unfinished_requests()
    engine.close()


@pytest.mark.parametrize(
    "config",
    [{}, AHEAD, dict(speculative=DRAFT_3, block_size=3), GRAPHS | OVERLAP | dict(max_num_seqs=5)],
    ids=["as it is", "ahead", "draft", "graphs, ahead"],
)
def test_who_can_say_nothing_more_ends_with_the_rules_that_are_to_blame(
    config, loaded, draft, family_oracle
) -> None:
    engine = make_engine(loaded, draft, **config)
    q, x, y = (TOKENIZER.encode(letter)[0] for letter in "qxy")
    heavy = "(" * 16 + "a" + "{1,99})" * 16
    why = ": no token may come next"
    right = {
        f"grammar{why}": dict(grammar=Choice(["aß", "aé"])),  # no token has the letter
        f"allowed_token_ids and grammar{why}": dict(
            grammar=Regex("ab*"), allowed_token_ids=[x], bad_words=[[q]]
        ),
        f"bad_words and grammar{why}": dict(grammar=Regex("xy"), bad_words=[[x, y], [q]]),
        f"grammar (lexer error: too many expressions constructed){why}": dict(
            grammar=Regex(f"x{heavy}")
        ),
    }
    params = [SamplingParams(temperature=0, **how) for how in right.values()]
    *bad, other = engine.generate_batch(
        [prompts_of(family_oracle)[0]] * 5, [*params, bound_params(None)]
    ).values()
    assert [output.metrics.finish_detail for output in bad] == list(right)
    assert all(output.outputs[0].finish_reason == "error" for output in bad)
    assert other.outputs[0].finish_reason == "length"
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
def test_what_can_not_be_meant_is_refused(how, why, loaded) -> None:
    engine = make_engine(loaded)
    with pytest.raises(ValueError, match=why):
        engine.add_request("a", [5], SamplingParams(**{"grammar": Regex("a"), **how}))
    assert not engine.has_unfinished_requests()


def test_without_what_it_needs_it_is_refused(loaded, monkeypatch) -> None:
    params, config = SamplingParams(grammar=Regex("a")), EngineConfig(num_blocks=9)
    bare = LLMEngine(config, loaded=loaded)
    with pytest.raises(ValueError, match="without a tokenizer"):
        bare.add_request("a", [5], params)
    listed = replace(loaded, generation_eos_token_ids=())
    endless = LLMEngine(config, loaded=listed, tokenizer=Tokenizer(TOKENIZER.backend))
    with pytest.raises(ValueError, match="no EOS token"):
        endless.add_request("a", [5], params)
    only_the_tokenizers = LLMEngine(config, loaded=listed, tokenizer=TOKENIZER)
    (output,) = only_the_tokenizers.generate_batch([[5]], replace(params, max_tokens=9)).values()
    assert output.outputs[0].token_ids[-1] == EOS and output.outputs[0].text == "a"
    monkeypatch.setattr("common.requests.input_processor.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'vllm-from-scratch\[grammar\]'"):
        make_engine(loaded).add_request("a", [5], params)


def test_a_grammar_that_is_slow_to_compile_holds_up_nobody(
    loaded, family_oracle, expected, monkeypatch
) -> None:
    """And who waits for one may go at any time, and so may the engine."""
    engine, prompt, goes_on = make_engine(loaded), prompts_of(family_oracle)[0], threading.Event()
    compile_source = grammar_compiler.compile_source

    def compile(source: str, tokenizer: object) -> str:
        assert goes_on.wait(60)
        return compile_source(source, tokenizer)

    monkeypatch.setattr(grammar_compiler, "compile_source", compile)
    for name in ("regex", "choice", "json", None):
        engine.add_request(name or "free", prompt, bound_params(name))
    done: dict[str, list[int]] = {}

    def step() -> None:
        for output in engine.step():
            if output.finished:
                done[output.request_id] = output.outputs[0].token_ids

    for _ in as_long_as(lambda: "free" not in done, max_rounds=100):
        step()
    for _ in range(3):
        step()  # nobody can do anything, and that is no fault
    engine.abort_request("choice")
    goes_on.set()
    for _ in as_long_as(engine.has_unfinished_requests, max_rounds=1000):
        step()
    assert done == {"choice": []} | {n or "free": expected[n][0] for n in ("regex", "json", None)}
    goes_on.clear()
    engine.add_request("late", prompt, bound_params("nested"))
    engine.close()
    goes_on.set()


def test_what_would_take_for_ever_ends_in_an_error_soon(loaded, family_oracle, expected) -> None:
    """The library counts what it does: no clock decides, and no process has to be ended."""
    engine, prompt = make_engine(loaded), prompts_of(family_oracle)[0]
    endless = [
        Regex("(" * 30 + "a" + "{1,99})" * 30),
        Regex("(a|b)*a(a|b){900}c"),
        Ebnf("root ::= " + "(" * 12 + "[ab]*" + ")*" * 12 + ' "c"'),
    ]
    params = [SamplingParams(temperature=0, grammar=g) for g in endless]
    rules, a = Ebnf('root ::= s\ns ::= s s | s s s | "a"'), TOKENIZER.encode("a")
    ways = SamplingParams(temperature=0, max_tokens=1000, grammar=rules, allowed_token_ids=a)
    began = time.monotonic()
    outputs = engine.generate_batch([prompt] * 5, [*params, ways, bound_params(None)]).values()
    assert time.monotonic() - began < 100
    *bad, ambiguous, free = outputs
    assert free.outputs[0].token_ids == expected[None][0]
    assert set(ambiguous.outputs[0].token_ids) == set(a)
    assert f"grammar ({TOO_MANY_WAYS})" in str(ambiguous.metrics.finish_detail)
    for output in bad:
        assert output.outputs[0].finish_reason in ("error", "length", "stop")
    assert bad[0].outputs[0].finish_reason == "error", bad[0].metrics
    engine.close()
