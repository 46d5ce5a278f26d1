"""The demo, run as a user runs it."""

from __future__ import annotations

import gc
import re
from collections import Counter
from pathlib import Path

import pytest

from adaptive_length import AdaptiveLength
from common import demo


def texts_of(out: str) -> str:
    return out[out.index("--- request-") : out.index("=== Summary")]


STAGES = ("1 arrive", "2 schedule", "3 blocks", "4 prepare", "5 forward", "6 sample", "7 update")
DRAFTS = ["draft tokens accepted", "drafts accepted: request-"]
DRAFTS += ["    propose   draft tokens for the next step"]


def test_options_change_no_word_and_the_trace_tells_what_they_do(capsys, monkeypatch) -> None:
    """The number of useful drafts depends on the clock; this test always drafts the maximum."""
    monkeypatch.setattr(
        AdaptiveLength, "choose", lambda self, ids: [self.num_spec_tokens] * len(ids)
    )
    arguments = ["--prompt", "class A:", "--prompt", "for i in range(", "--max-tokens", "24"]
    texts = []
    for more, expected in (
        ([], ["2 waiting", "(length)"]),
        (["--speculative", "ngram"], DRAFTS),
        (["--speculative", "draft"], DRAFTS),
        (["--chunked-prefill", "3"], ["nothing: its prompt is unfinished"]),
    ):
        assert demo.main([*arguments, "--trace", *more]) == 0
        out = capsys.readouterr().out
        texts.append(texts_of(out))
        assert [part for part in expected if part not in out] == []
        num_steps = out.count("5 forward")
        assert {out.count(f"  {stage} ") for stage in STAGES} == {num_steps}
        assert (num_steps == 24) == (more == [])
        assert [out.count(f"step {n}  (") for n in (0, 1, num_steps)] == [0, 1, 1]
    assert len(set(texts)) == 1


@pytest.mark.parametrize("is_same", [True, False])
def test_a_sequential_run_is_compared_token_by_token(is_same: bool, capsys, monkeypatch) -> None:
    def other_token(*arguments):
        result = run_sequentially(*arguments)
        result.outputs[1].outputs[0].token_ids[-1] += 1
        return result

    run_sequentially = demo.run_sequentially
    if not is_same:
        monkeypatch.setattr(demo, "run_sequentially", other_token)
    arguments = ["--num-prompts", "3", "--max-tokens", "3", "--compare-sequential"]
    assert demo.main([*arguments, "--dtype", "float64" if is_same else "bfloat16"]) == 0
    out = capsys.readouterr().out
    assert "times as fast" in out
    steps = re.findall(r"^steps +(\d+)", out, re.MULTILINE)
    assert f"3 requests shared {steps[0]} steps; one at a time they take {steps[1]}." in out
    if is_same:
        assert re.search(r"tokens +identical\n", out)
    else:
        assert re.search(r"tokens +identical for [0-2] of 3 requests", out)
        assert "calculates in torch.bfloat16" in out and "--dtype float64" in out


def test_the_default_demo_prints_texts_worth_reading_and_a_summary(capsys) -> None:
    """No line comes a third time, and another run prints the same."""
    gc.unfreeze()  # conftest.py
    texts = []
    for _ in range(2):
        assert demo.main([]) == 0
        out = capsys.readouterr().out
        assert "torch.float32" in out and "nan" not in out
        texts.append(out[: out.index("=== Summary")])
    assert texts[0] == texts[1] and all(prompt in texts[0] for prompt in demo.PROMPTS)
    for line in ("requests             8", "output throughput", "inter-token latency", "KV memory"):
        assert line in out
    assert gc.get_freeze_count() > 0, "it is a program, and may"
    for text in texts[0].split("--- request-")[1:]:
        lines = Counter(line.strip() for line in text.splitlines() if line.strip(" #"))
        assert len(lines) >= 8 and max(lines.values()) <= 2, text


def test_only_outputs_with_a_grammar_are_json(capsys) -> None:
    assert demo.main(["--grammar"]) == 0
    bound, free = capsys.readouterr().out.split("=== without")
    assert "4 of 4 are JSON" in bound and "4 of 4" not in free


def test_each_prompt_is_answered_with_the_adapter_and_without_in_one_batch(capsys) -> None:
    """Beside each other; alone, each text is the same."""
    arguments = ["--adapters", "--num-prompts", "2", "--max-tokens", "24", "--dtype", "float64"]
    assert demo.main([*arguments, "--compare-sequential"]) == 0
    out = capsys.readouterr().out
    assert "requests             4" in out and "tokens               identical" in out
    first, second = out[: out.index("=== Summary")].split("--- ")[1:]
    for shown, head in ((first, demo.HEADS[0]), (second, demo.HEADS[1])):
        assert shown.startswith(f"{head}\n\nwithout")
        rows = shown.partition("with the adapter\n")[2].splitlines()
        plain, adapted = zip(*(line.split("|", 1) for line in rows if "|" in line), strict=True)
        assert adapted[0].startswith(" def test_") and adapted[1].startswith("     assert ")
        assert not any("def test_" in line for line in plain)


def test_more_tokens_than_the_model_can_hold_are_noted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "show_grammar", lambda *_: None)  # else a run of 2,000 steps
    for length, note in ("2048", ""), ("2049", "2049 is too many: prompt and output together"):
        assert demo.main(["--grammar", "--max-tokens", length]) == 0
        shown = capsys.readouterr().err
        assert note in shown and shown.count("too many") == bool(note)


def test_prompts_come_from_a_file_and_are_repeated_to_the_number(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\ntwo\n")
    args = demo.parse_args(["--prompts-file", str(path), "--num-prompts", "5"])
    assert demo.load_prompts(args) == ["one", "two", "one", "two", "one"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--prompts-file", "no-such-file"], "no-such-file"),
        (["--num-prompts", "0"], "--num-prompts must"),
        (["--max-tokens", "0"], "max_tokens must"),
        (["--chunked-prefill", "0"], "chunked_prefill must"),
        (["--model", "no/such/directory"], "no/such/directory"),
        (["--device", "cuda:99"], "cuda"),
        (["--dtype", "float12"], "float12"),
        (["--prompt", ""], "prompt"),
        (["--adapters", "--batch-invariant"], "adapters"),
    ],
)
def test_mistakes_end_in_one_sentence(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main(arguments) == 2
    assert named in capsys.readouterr().err
