"""Grammars of an engine's requests, on the scheduler's side: made when the first one is brought."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from common.grammars.grammar_compiler import GrammarCompiler
from common.grammars.vocabulary import Vocabulary
from common.loader import resolve_checkpoint
from common.tokenizer import Tokenizer, load_tokenizer
from grammar_queue import GrammarsCompiled
from scheduler_books import SchedulerBooks


class RequestGrammars:
    """`queue` stands last in the list of the scheduler's plugins from now on."""

    def __init__(self, books: SchedulerBooks, vocabulary: Vocabulary) -> None:
        self.compiler = GrammarCompiler(vocabulary)
        self.queue, self.close = GrammarsCompiled(self.compiler.submit), self.compiler.close
        books.set_plugins([*books.plugins, self.queue])


def vocabulary_of(
    tokenizer: Tokenizer,
    vocab_size: int,
    eos_token_ids: Sequence[int],
    elsewhere: str | Path | None = None,
) -> Vocabulary:
    """`elsewhere`: the checkpoint of ranks in other processes, which have its own tokenizer. Raises
    `ValueError` if this one is another."""
    vocabulary = Vocabulary.of(tokenizer, vocab_size, eos_token_ids)
    if elsewhere is not None:
        theirs = load_tokenizer(resolve_checkpoint(elsewhere))
        if vocabulary != Vocabulary.of(theirs, vocab_size, eos_token_ids):
            raise ValueError("grammar: over several ranks it needs the tokenizer of the checkpoint")
    return vocabulary
