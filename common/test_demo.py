"""The demo, run as a user runs it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from adaptive_length import AdaptiveLength
from common import demo
from draft_plugin import FixedLength


def texts_of(out: str) -> str:
    return out[out.index("--- request-") : out.index("=== Summary")]


STAGES = ("1 arrive", "2 schedule", "3 blocks", "4 prepare", "5 forward", "6 sample", "7 update")


def test_options_change_no_word_and_the_trace_tells_what_they_do(capsys, monkeypatch) -> None:
    """The number of useful drafts depends on the clock; this test always drafts the maximum."""
    monkeypatch.setattr(AdaptiveLength, "choose", FixedLength.choose)
    arguments = ["--prompt", "class A:", "--prompt", "for i in range(", "--max-tokens", "24"]
    texts = set[str]()
    for more, expected in (
        ([], "(length)"),
        (["--speculative", "ngram"], "drafts accepted: request-"),
        (["--speculative", "draft"], "    propose   draft tokens for the next step"),
        (["--chunked-prefill", "3"], "nothing: its prompt is unfinished"),
    ):
        assert demo.main([*arguments, "--trace", *more]) == 0
        out = capsys.readouterr().out
        texts.add(texts_of(out))
        assert expected in out
        num_steps = out.count("5 forward")
        assert {out.count(f"  {stage} ") for stage in STAGES} == {num_steps}
        assert (num_steps == 24) == (more == [])
    assert len(texts) == 1


def test_the_default_demo_prints_texts_worth_reading_and_a_summary(capsys) -> None:
    """No line comes a third time."""
    assert demo.main([]) == 0
    out = capsys.readouterr().out
    assert "nan" not in out and all(prompt in out for prompt in demo.PROMPTS)
    for line in ("requests             8", "output throughput", "inter-token latency", "KV memory"):
        assert line in out
    for text in texts_of(out).split("--- request-")[1:]:
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


def test_prompts_come_from_a_file_and_mistakes_end_in_one_sentence(tmp_path: Path, capsys) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\ntwo\n")
    args = demo.parse_args(["--prompts-file", str(path), "--num-prompts", "5"])
    assert demo.load_prompts(args) == ["one", "two", "one", "two", "one"]
    for arguments, named in (
        ("--prompts-file no-such-file", "no-such-file"),
        ("--num-prompts 0", "--num-prompts must"),
        ("--chunked-prefill 0", "chunked_prefill must"),
        ("--model no/such/directory", "no/such/directory"),
        ("--device cuda:99", "cuda"),
        ("--prompt=", "prompt"),
        ("--adapters --batch-invariant", "adapters"),
    ):
        assert demo.main(arguments.split()) == 2
        assert named in capsys.readouterr().err
