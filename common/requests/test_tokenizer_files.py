"""Prompt ids are those of `tokenizer.json`, whatever class a checkpoint names. The oracle is the
`tokenizers` library on the file: transformers rebuilds parts of some files (Trap 80)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, processors, trainers
from tokenizers import Tokenizer as Backend
from tokenizers.pre_tokenizers import ByteLevel, Digits, Metaspace, PreTokenizer, Sequence, Split

from common.features.grammars.vocabulary import Vocabulary
from common.requests.test_tokenizer import TEXT, stream
from common.requests.tokenizer import load_tokenizer

_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
THREE_DIGITS, ONE_DIGIT = _SHORT + _WORDS % r"\p{N}{1,3}", _SHORT + _WORDS % r"\p{N}"
CASED = r"[^\r\n\p{L}\p{N}]?\p{Lu}*\p{Ll}+|[^\r\n\p{L}\p{N}]?\p{Lu}+|" + _WORDS % r"\p{N}"
LLAMA_2 = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
TEXTS = [
    *(" the dog", "the dog</s> goes on", "  two", "1234567 in 2024", "it's I'LL We'Ve", ""),
    *("camelCase HELLOWorld", "\n\nx\r\n  y\t", "e\u0301 é ﬁ ▁", "你好 世界, 😀", "a  b   c"),
    *("x<think> y", "über zebra zebra", "a called e\u0301 b called é"),
]


def split(*patterns: str) -> PreTokenizer:
    parts = [Split(Regex(pattern), "isolated") for pattern in patterns]
    return Sequence([*parts, ByteLevel(add_prefix_space=False, use_regex=False)])


FILES = {  # model_type: what its checkpoints have, normalizer and pre-tokenizer
    "llama": {
        "2": (LLAMA_2, None),
        "3": (None, split(THREE_DIGITS)),
        "DeepSeek": (None, split(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥]+", r"\p{N}")),
        "SmolLM": (None, Sequence([Digits(True), ByteLevel(add_prefix_space=False)])),
    },
    "mistral": {
        "0.1": (LLAMA_2, None),
        "0.3": (None, Metaspace(prepend_scheme="first", split=False)),
        "Nemo": (None, split(CASED)),
    },
    "mixtral": {"": (LLAMA_2, None)},
    "qwen2": {
        "": (normalizers.NFC(), split(ONE_DIGIT)),
        "distilled": (None, split(THREE_DIGITS)),
        "Llama 2": (LLAMA_2, None),
    },
    "qwen3": {"": (normalizers.NFC(), split(ONE_DIGIT))},
    "qwen3_moe": {"": (normalizers.NFC(), split(ONE_DIGIT))},
    "gemma3_text": {"": (normalizers.Replace(" ", "▁"), Split(" ", "merged_with_previous"))},
    "olmo3": {"": (None, split(THREE_DIGITS))},
}
CLASSES = (
    *(None, "PreTrainedTokenizerFast", "TokenizersBackend", "LlamaTokenizer"),
    *("LlamaTokenizerFast", "GPT2Tokenizer", "Qwen2Tokenizer", "GemmaTokenizer"),
)


def tokenizer_file(normalizer, splitter) -> Backend:
    """A small one, with a token that no merge makes, as Llama 3 has them."""
    in_bytes = "ByteLevel(" in repr(splitter)
    backend = Backend(models.BPE(unk_token=None if in_bytes else "<unk>"))
    backend.pre_tokenizer = splitter if in_bytes else Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=ByteLevel.alphabet() if in_bytes else [],
        show_progress=False,
    )
    backend.train_from_iterator(TEXT, trainer)
    content = json.loads(backend.to_str())
    vocab = content["model"]["vocab"]
    for token in ["Ġzebra"] if in_bytes else [f"<0x{byte:02X}>" for byte in range(256)]:
        vocab[token] = len(vocab)
    flags = {"ignore_merges": True} if in_bytes else {"byte_fallback": True, "fuse_unk": True}
    content["model"] |= flags
    backend = Backend.from_str(json.dumps(content))
    backend.normalizer = normalizer
    backend.pre_tokenizer = splitter
    if in_bytes:
        backend.decoder = decoders.ByteLevel()
    else:
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        parts += [decoders.Strip(" ", 1, 0)] if "repend" in f"{normalizer!r}{splitter!r}" else []
        backend.decoder = decoders.Sequence(parts)
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    backend.add_tokens([AddedToken("<think>", normalized=False), AddedToken("called é")])
    return backend


def save(backend: Backend, path: Path, model_type: str, **config: object) -> Backend:
    """The tokenizer's files of a checkpoint, and what the library reads of the first."""
    backend.save(str(path / "tokenizer.json"))
    tokenizer_config = {"bos_token": "<s>", "eos_token": "</s>"} | config
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (path / "config.json").write_text(json.dumps({"model_type": model_type}))
    return Backend.from_file(str(path / "tokenizer.json"))


@pytest.mark.parametrize("model_type", FILES)
def test_prompt_ids_and_texts_are_those_of_the_file_for_every_class(
    model_type: str, tmp_path: Path
) -> None:
    """Trap 80: an oracle that asks the same class cannot see what the class has changed."""
    for kind, parts in FILES[model_type].items():
        backend = tokenizer_file(*parts)
        for name in CLASSES:
            file = save(
                backend, tmp_path, model_type, **({"tokenizer_class": name} if name else {})
            )
            loaded = load_tokenizer(tmp_path)
            vocabulary = Vocabulary.of(loaded, loaded.vocab_size, [])
            for text in TEXTS:
                about = (kind, name, text)
                ids = file.encode(text).ids
                assert loaded.encode(text) == ids, about
                assert loaded.encode(text, add_special_tokens=False) == ids[1:], about
                whole = file.decode(ids)
                assert loaded.decode(ids) == whole == stream(loaded, [], ids)[1], about
                decoded = b"".join(
                    vocabulary.token_bytes[i] for i in ids if i not in loaded.special_ids
                )
                assert decoded.decode().strip(" ") == whole.strip(" "), about


def test_added_tokens_stay_as_transformers_loads_them(tmp_path: Path) -> None:
    """Added tokens are also in `tokenizer_config.json`."""
    config = {"tokenizer_class": "LlamaTokenizer", "pad_token": "[PAD]"}
    file = save(tokenizer_file(LLAMA_2, None), tmp_path, "llama", **config)
    loaded = load_tokenizer(tmp_path)
    pad = file.get_vocab_size()
    assert loaded.encode("[PAD]") == [1, pad] and pad in loaded.special_ids
