"""Grammars of an engine's requests, on the scheduler's side: made when the first one is brought."""

from __future__ import annotations

from collections.abc import Sequence

from common.grammars.grammar_compiler import GrammarCompiler
from common.grammars.vocabulary import Vocabulary
from common.tokenizer import Tokenizer
from grammar_queue import GrammarsCompiled
from scheduler_books import SchedulerBooks


class RequestGrammars:
    """`queue` stands last in the list of the scheduler's plugins from now on."""

    def __init__(
        self,
        books: SchedulerBooks,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: Sequence[int],
    ) -> None:
        compiler = GrammarCompiler(Vocabulary.of(tokenizer, vocab_size, eos_token_ids))
        self.compiler = compiler
        self.queue, self.close = GrammarsCompiled(compiler.submit), compiler.close
        books.set_plugins([*books.plugins, self.queue])
