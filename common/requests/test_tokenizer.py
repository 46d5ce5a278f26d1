"""Text while it grows: what has been shown stays, and the whole is what a full decode gives."""

from __future__ import annotations

import itertools
import random
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from common.requests.tokenizer import IncrementalDetokenizer, Tokenizer, load_tokenizer

TEXT = [
    "the quick brown fox jumps over the lazy dog, and the dog does not mind the fox at all",
    "def fibonacci(n): return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)",
    "naïve café, übergroß; 你好 世界 世界 日本語 emoji 😀 😀 family 👩‍👩‍👧 flags 🇩🇪",
] * 4
HARD = "a é你好, 👩‍👩‍👧‍👦 🇩🇪 e\u0301 x\U0001f600y  \n\tz ﷽ 😀😀"


def byte_level() -> Tokenizer:
    """Like GPT-2, Qwen and Llama 3: any bytes, and merges small enough to cut characters."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=["<|end|>", "<|pad|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    backend.add_tokens(
        [AddedToken("<think>", special=False), AddedToken("ölig \u2581", special=False)]
    )
    return Tokenizer(backend, backend.token_to_id("<|end|>"))


def metaspace() -> Tokenizer:
    """Like T5: a token's leading space is dropped at the beginning of a text."""
    backend = Backend(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    backend.train_from_iterator(TEXT, trainer)
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return Tokenizer(backend, 2)


def byte_fallback() -> Tokenizer:
    """Like Llama 2 and Mistral: Metaspace, and single bytes for characters without a token."""
    trained = metaspace().backend
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for text in [*(f"<0x{b:02X}>" for b in range(256)), *trained.get_vocab(False)]:
        if text not in "你好世界日本語😀":  # these must go through their bytes
            vocab.setdefault(text, len(vocab))
    backend = Backend(
        models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend, 2)


KINDS = {"byte level": byte_level(), "metaspace": metaspace(), "byte fallback": byte_fallback()}


@pytest.fixture(params=list(KINDS))
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return KINDS[request.param]


def stream(
    tokenizer: Tokenizer, prompt: list[int], outputs: list[int], skip: bool = True
) -> tuple[list[str], str]:
    """All deltas, the last one after `finish()`, and the text. Checks that nothing is taken
    back."""
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip)
    deltas = []
    before = ""
    for token in outputs:
        assert detokenizer.append(token) is None
        deltas.append(detokenizer.take_delta())
        assert detokenizer.text.startswith(before)
        before = detokenizer.text
        assert "".join(deltas) == before, "without stop strings nothing is held back"
    detokenizer.finish()
    deltas.append(detokenizer.take_delta())
    assert "".join(deltas) == detokenizer.text
    return deltas, detokenizer.text


def expected_text(
    tokenizer: Tokenizer, prompt: list[int], outputs: list[int], skip: bool = True
) -> str:
    """The continuation by full decodes of a prompt that ends at a character border."""
    before = tokenizer.decode(prompt, skip)
    whole = tokenizer.decode(prompt + outputs, skip)
    assert whole.startswith(before)
    return whole[len(before) :]


def broken_run(tokenizer: Tokenizer, ids: list[int]) -> bool:
    """A run of byte tokens that is not UTF-8. There a full decode takes back characters that were
    complete, which no stream can."""
    texts = [tokenizer.backend.id_to_token(i) for i in ids if i not in tokenizer.special_ids]
    groups = itertools.groupby(texts, key=lambda p: bool(re.fullmatch("<0x..>", p)))
    for is_bytes, run in groups:
        if is_bytes:
            raw = bytes(int(text[3:5], 16) for text in run)
            if raw.decode("utf-8", "replace") != raw.decode("utf-8", "ignore"):
                return True
    return False


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@pytest.mark.parametrize("kind", list(KINDS))
@settings(max_examples=150, deadline=None, derandomize=True)
@given(prompt=TEXTS, text=TEXTS | st.just(HARD))
def test_stream_of_any_text_is_the_full_decode(kind: str, prompt: str, text: str) -> None:
    tokenizer = KINDS[kind]
    prompt_ids, ids = tokenizer.encode(prompt), tokenizer.encode(text)
    if broken_run(tokenizer, prompt_ids + ids):
        return
    for skip in (True, False):
        _, found = stream(tokenizer, prompt_ids, ids, skip)
        assert found == expected_text(tokenizer, prompt_ids, ids, skip)


@pytest.mark.parametrize("kind", list(KINDS))
@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.data())
def test_stream_of_random_token_ids_is_the_full_decode(kind: str, data: st.DataObject) -> None:
    tokenizer = KINDS[kind]
    ids = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30)
    prompt, outputs = data.draw(ids), data.draw(ids)
    skip = data.draw(st.booleans())
    _, found = stream(tokenizer, prompt, outputs, skip)
    if tokenizer.backend.decoder.__class__ is decoders.ByteLevel:
        assert found == tokenizer.decode(outputs, skip)
    elif not (broken_run(tokenizer, prompt) or broken_run(tokenizer, prompt + outputs)):
        assert found == expected_text(tokenizer, prompt, outputs, skip)


def test_random_byte_tokens_show_each_stray_byte_and_each_whole_character() -> None:
    tokenizer = KINDS["byte fallback"]
    rng = random.Random(0)
    id_of = {b: tokenizer.backend.token_to_id(f"<0x{b:02X}>") for b in range(256)}
    for _ in range(300):
        raw = b"".join(
            rng.choice(["你".encode(), "😀".encode(), b"\xe4\xbd", b"\xf0\x9f", b"\x80", b"\xff"])
            for _ in range(6)
        )
        _, found = stream(tokenizer, [id_of[65]], [id_of[b] for b in raw])
        expected, i = "", 0
        while i < len(raw):  # the longest character here, else one U+FFFD for this byte
            for n in (1, 2, 3, 4):
                try:
                    expected += raw[i : i + n].decode()
                    i += n
                    break
                except UnicodeDecodeError:
                    continue
            else:
                expected += "\ufffd"
                i += 1
        assert found == expected, raw


def test_characters_are_shown_whole_wherever_tokens_cut_them(tokenizer: Tokenizer) -> None:
    """Trap 47: cut at every token border, no half character is ever shown."""
    context = tokenizer.encode("a")
    ids = tokenizer.encode(HARD)
    if tokenizer is not KINDS["metaspace"]:  # its unknown characters are <unk>
        assert "👩‍👩‍👧‍👦" in tokenizer.decode(ids)
        assert any("\ufffd" in tokenizer.decode([i]) for i in ids), "no token cuts a character"
    for end in range(len(ids) + 1):
        deltas, found = stream(tokenizer, context, ids[:end])
        assert not any("\ufffd" in delta for delta in deltas[:-1])
        kept = deltas[:-1]
        assert stream(tokenizer, context, ids)[0][: len(kept)] == kept
        if end == len(ids):
            assert "\ufffd" not in found


def test_a_prompt_that_ends_inside_a_character_does_not_leak() -> None:
    """Trap 47: the output begins with the rest of a character whose beginning is the prompt's."""
    for kind in ("byte level", "byte fallback"):
        tokenizer = KINDS[kind]
        ids = tokenizer.encode("secret 𝄞 rest")
        cut = 2 + next(i for i, t in enumerate(ids) if "\ufffd" in tokenizer.decode([t]))
        _, found = stream(tokenizer, ids[:cut], ids[cut:])
        assert found.endswith(" rest"), kind
        assert "secret" not in found
        assert set(found[: -len(" rest")]) == {"\ufffd"}, "bytes alone are no character"


@pytest.mark.parametrize("byte", [0x80, 0xE4, 0xF0, 0xFF])
def test_bytes_that_never_become_a_character_do_not_stall(byte: int) -> None:
    """Trap 47: at most one incomplete character is ever held."""
    for kind in ("byte level", "byte fallback"):
        tokenizer = KINDS[kind]
        every = range(tokenizer.vocab_size)
        token = next(t for t in every if tokenizer.token_bytes(t) == bytes([byte]))
        detokenizer = IncrementalDetokenizer(tokenizer, tokenizer.encode("a"))
        for n in range(1, 2000):
            detokenizer.append(token)
            detokenizer.take_delta()
            assert detokenizer._num_sent >= n - 3
        assert len(detokenizer.text) >= 1996


def test_the_cost_of_a_token_does_not_grow_with_the_output(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted, not timed: how many ids are given to the tokenizer's decode."""
    ids = (tokenizer.encode(HARD) + [tokenizer.eos_token_id] * 50 + [t for t in range(200)]) * 20
    num_decoded = 0
    decode = Tokenizer.decode

    def counting(self: Tokenizer, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        nonlocal num_decoded
        num_decoded += len(token_ids)
        return decode(self, token_ids, skip_special_tokens)

    monkeypatch.setattr(Tokenizer, "decode", counting)
    detokenizer = IncrementalDetokenizer(tokenizer, [5], stop=["never there"])
    for token in ids:
        detokenizer.append(token)
        detokenizer.take_delta()
    assert num_decoded <= 2 * tokenizer.vocab_size + 100


def test_the_first_word_keeps_its_space_after_a_prompt_and_drops_it_at_the_beginning() -> None:
    for kind in ("metaspace", "byte fallback"):
        tokenizer = KINDS[kind]
        the = tokenizer.backend.token_to_id("▁the")
        assert stream(tokenizer, tokenizer.encode("all"), [the, the])[1] == " the the"
        assert stream(tokenizer, [1], [the, the])[1] == "the the", "nothing shows before it"
        assert stream(tokenizer, [1], [the], skip=False)[1] == expected_text(
            tokenizer, [1], [the], False
        )


def test_special_tokens_are_skipped_or_shown_and_count_as_tokens(tokenizer: Tokenizer) -> None:
    """And ids without a token are nothing, and do not begin the text."""
    the = tokenizer.encode("all the")[-1]
    beyond = tokenizer.vocab_size + 7
    assert tokenizer.token_bytes(beyond) == b""
    expected = expected_text(tokenizer, [], [beyond, the])
    assert stream(tokenizer, [beyond], [beyond, the])[1] == expected
    ids = tokenizer.encode("the dog")
    outputs = [*ids, tokenizer.eos_token_id, *ids]
    end = tokenizer.backend.id_to_token(tokenizer.eos_token_id)
    assert end not in stream(tokenizer, ids, outputs)[1]
    assert stream(tokenizer, ids, outputs, skip=False)[1].count(end) == 1
    detokenizer = IncrementalDetokenizer(tokenizer, ids, stop=["dog"])
    matches = [detokenizer.append(t) for t in [tokenizer.eos_token_id, *ids]]
    assert matches[-1] == "dog" and detokenizer.num_tokens == 1 + len(ids)


# -- stop strings


def naive_stop(
    texts: list[str], stop: list[str], min_tokens: int = 0, includes_stop: bool = False
) -> tuple[str, int, str] | None:
    """`(stop string, tokens kept, text)` by searching the text after every token."""
    for n in range(1, len(texts) + 1):
        text = "".join(texts[:n])
        old = len("".join(texts[: n - 1]))
        found = [
            (start + len(s), start, s)
            for s in stop
            for start in range(len(text))
            if text.startswith(s, start) and start + len(s) > old
        ]
        if found and n > min_tokens:
            _, start, s = min(found)
            return s, n, text[: start + len(s) * includes_stop]
    return None


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    texts=st.lists(st.text("ab", min_size=1, max_size=4), max_size=14),
    stop=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3),
    min_tokens=st.integers(0, 4),
    takes=st.lists(st.booleans(), min_size=14, max_size=14),
    includes=st.booleans(),
)
def test_stop_strings_are_found_at_their_earliest_end_and_never_streamed(
    texts: list[str], stop: list[str], min_tokens: int, takes: list[bool], includes: bool
) -> None:
    words = ["".join(p) for n in range(1, 5) for p in itertools.product("ab", repeat=n)]
    id_of = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(Backend(models.WordLevel(id_of, unk_token="a")))
    tokenizer.backend.decoder = decoders.Fuse()
    detokenizer = IncrementalDetokenizer(tokenizer, [0], stop, True, min_tokens, includes)
    expected = naive_stop(texts, stop, min_tokens, includes)
    sent = ""
    match = None
    for text, take in zip(texts, takes):
        match = detokenizer.append(id_of[text])
        if take:
            sent += detokenizer.take_delta()
            text = detokenizer.text
            held = text.removeprefix(sent)
            assert not held or (any(s.startswith(held) for s in stop) and not includes), "too much"
        if match:
            break
    detokenizer.finish()
    sent += detokenizer.take_delta()
    assert sent == detokenizer.text
    if expected is None:
        assert match is None
        assert sent == "".join(texts)
    else:
        assert (match, detokenizer.num_tokens, sent) == expected


def test_a_stop_string_may_hold_characters_that_tokens_cut() -> None:
    tokenizer = KINDS["byte level"]
    ids = tokenizer.encode("ab 😀𝄞 cd")
    detokenizer = IncrementalDetokenizer(tokenizer, ids, stop=["𝄞"])
    match = next(filter(None, map(detokenizer.append, ids)))
    n = detokenizer.num_tokens
    assert (match, detokenizer.text) == ("𝄞", "ab 😀")
    assert "𝄞" in tokenizer.decode(ids[:n])
    assert "𝄞" not in tokenizer.decode(ids[: n - 1])
    with pytest.raises(RuntimeError, match="stop string"):
        detokenizer.append(ids[0])


# -- the tokenizer itself


def test_a_decoder_that_changes_earlier_text_is_refused_not_garbled() -> None:
    backend = KINDS["byte level"].backend.__class__(models.WordLevel({"ab": 0, "c": 1}, "ab"))
    backend.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace("abc", "X")])
    detokenizer = IncrementalDetokenizer(Tokenizer(backend), [0])
    with pytest.raises(ValueError, match="cannot stream"):
        detokenizer.append(1)


def test_a_saved_tokenizer_loads_with_its_special_tokens_and_decodes_as_its_file_says(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    from transformers import PreTrainedTokenizerFast

    end = tokenizer.backend.id_to_token(tokenizer.eos_token_id)
    backend = Backend.from_str(tokenizer.backend.to_str())
    backend.enable_truncation(3)
    backend.enable_padding(length=50, pad_id=tokenizer.eos_token_id, pad_token=end)
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end).save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    file = Backend.from_file(str(tmp_path / "tokenizer.json"))
    file.no_truncation()
    file.no_padding()
    assert loaded.eos_token_id == tokenizer.eos_token_id
    assert loaded.vocab_size == tokenizer.vocab_size
    assert loaded.eos_token_id in loaded.special_ids
    for text in (HARD, "the dog " * 9):
        assert loaded.encode(text) == file.encode(text).ids
        ids = [*loaded.encode(text), loaded.eos_token_id]
        for skip in (True, False):
            assert loaded.decode(ids, skip) == file.decode(ids, skip_special_tokens=skip)


def test_a_missing_directory_or_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=re.escape(str(tmp_path))):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{broken")
    with pytest.raises(ValueError, match="tokenizer"):
        load_tokenizer(tmp_path)
