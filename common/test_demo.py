"""The demo, run as a user runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from common import demo


def test_default_demo_prints_every_text_and_a_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--max-tokens", "12"]) == 0
    out = capsys.readouterr().out
    for prompt in demo.PROMPTS:
        assert prompt in out
    for line in ("requests             8", "output throughput", "inter-token latency", "KV memory"):
        assert line in out
    assert "nan" not in out


def test_trace_tells_seven_stages_of_each_step(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--prompt", "class A:", "--prompt", "def f(", "--max-tokens", "3", "--trace"]
    assert demo.main(arguments) == 0
    out = capsys.readouterr().out
    stages = (
        "1 arrive",
        "2 schedule",
        "3 blocks",
        "4 prepare",
        "5 forward",
        "6 sample",
        "7 update",
    )
    assert [out.count(f"  {stage} ") for stage in stages] == [3] * 7
    assert "2 waiting" in out
    assert "(length)" in out


@pytest.mark.parametrize("method", ["ngram", "draft"])
def test_speculation_changes_no_word_and_tells_how_it_fared(method, capsys) -> None:
    arguments = ["--prompt", "class A:", "--prompt", "for i in range(", "--max-tokens", "24"]
    texts = []
    for more in ([], ["--speculative", method, "--trace"]):
        assert demo.main([*arguments, *more]) == 0
        out = capsys.readouterr().out
        texts.append(out[out.index("--- request-") : out.index("=== Summary")])
    assert texts[0] == texts[1]
    assert "guesses were right" in out and "guesses right: request-" in out
    assert "    propose   guesses for the next step" in out


def test_chunks_change_no_word_and_are_seen_in_the_trace(capsys) -> None:
    arguments = ["--prompt", "def longest_common_prefix(first, second):", "--max-tokens", "8"]
    texts, steps = [], []
    for more in ([], ["--chunked-prefill", "3"]):
        assert demo.main([*arguments, "--trace", *more]) == 0
        out = capsys.readouterr().out
        texts.append(out[out.index("--- request-") : out.index("=== Summary")])
        steps.append(out.count("5 forward"))
    assert texts[0] == texts[1]
    assert steps[1] > steps[0] + 1
    assert "nothing: its prompt goes on" in out


def test_sequential_comparison_finds_the_same_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--num-prompts", "3", "--max-tokens", "5", "--compare-sequential"]) == 0
    out = capsys.readouterr().out
    assert "identical" in out
    assert "NOT identical" not in out
    assert "times as fast" in out


def test_prompts_come_from_a_file_and_are_repeated_to_the_number(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\ntwo\n")
    args = demo.parse_args(["--prompts-file", str(path), "--num-prompts", "5"])
    assert demo.load_prompts(args) == ["one", "two", "one", "two", "one"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--prompts-file", "no-such-file"], "no-such-file"),
        (["--num-prompts", "0"], "--num-prompts is 0"),
        (["--max-tokens", "0"], "max_tokens is 0"),
        (["--chunked-prefill", "0"], "chunked_prefill is 0"),
        (["--model", "no/such/directory"], "no/such/directory"),
        (["--device", "cuda:99"], "cuda"),
        (["--prompt", ""], "prompt"),
    ],
)
def test_mistakes_end_in_one_sentence(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main(arguments) == 2
    assert named in capsys.readouterr().err
