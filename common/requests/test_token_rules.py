"""Token rules: the refused settings, and the tokens of a bad word. What they allow:
`common/sampling/test_sampler.py`."""

from __future__ import annotations

import pytest

from common.requests.token_rules import token_rules_of
from common.requests.tokenizer import Tokenizer
from request import SamplingParams


def check_ids(name: str, ids: list) -> list[int]:
    if not all(type(t) is int and 0 <= t < 9 for t in ids):
        raise ValueError(f"{name} holds {ids!r}")
    return ids


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("allowed_token_ids", v) for v in ((), [], "12", {1: 2}, 5, [9], ["a"], [1, 2])),
        *(("logit_bias", v) for v in ([1], 3, {9: 1.0}, {1: "a"}, {1: 100.1})),
        *(("logit_bias", {1: v}) for v in (float("nan"), float("inf"), 10**400, None)),
        *(("bad_words", v) for v in ("word", 3, [[]], [3], [""], [" "], [[9]], ["\ud800"], ["a"])),
    ],
)
def test_an_invalid_rule_is_a_clear_error(field: str, value: object) -> None:
    params = SamplingParams(**({"bad_words": [[2], [1]]} | {field: value}))
    with pytest.raises(ValueError, match=f"^{field} ") as error:
        token_rules_of(params, None, 9, check_ids)
    assert "\n" not in str(error.value)


def test_a_text_is_ruled_out_with_and_without_a_space_and_without_a_prompts_prefix(
    shipped_tokenizer: Tokenizer,
) -> None:
    from tokenizers.processors import TemplateProcessing

    backend = type(shipped_tokenizer.backend).from_str(shipped_tokenizer.backend.to_str())
    backend.post_processor = TemplateProcessing(single="bos $A", special_tokens=[("bos", 0)])
    assert Tokenizer(backend).encode("self")[0] == 0
    params = SamplingParams(bad_words=["self", "  self", [3, 4]])
    own = [shipped_tokenizer.encode(text, add_special_tokens=False) for text in ("self", " self")]
    for tokenizer in (shipped_tokenizer, Tokenizer(backend)):
        rules = token_rules_of(params, tokenizer, 4096, lambda _, ids: ids)
        assert rules["bad_words"] == [*own, [3, 4]] and own[0] != own[1]
