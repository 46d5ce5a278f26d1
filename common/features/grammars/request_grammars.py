"""The scheduler's side of grammars, made when the first request with a grammar arrives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from base_scheduler import BaseScheduler
from common.features.grammars.grammar_compiler import GrammarCompiler
from common.features.grammars.vocabulary import Vocabulary
from common.models.loader import resolve_checkpoint
from common.requests.tokenizer import Tokenizer, load_tokenizer
from grammar_queue import GrammarsCompiled


class RequestGrammars:
    """The grammars of an engine's requests. Adds `queue` to the end of the scheduler's plugins.
    `elsewhere` is the checkpoint of ranks in other processes, which use its tokenizer. Raises
    `ValueError` if `tokenizer` is another one."""

    def __init__(
        self,
        scheduler: BaseScheduler,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        elsewhere: str | Path | None = None,
    ) -> None:
        vocabulary = Vocabulary.of(tokenizer, vocab_size, eos_token_ids)
        if elsewhere is not None:
            rank_tokenizer = load_tokenizer(resolve_checkpoint(elsewhere))
            if vocabulary != Vocabulary.of(rank_tokenizer, vocab_size, eos_token_ids):
                raise ValueError(
                    "grammar must be None over several ranks without the checkpoint's tokenizer"
                )
        self.compiler = GrammarCompiler(vocabulary)
        self.queue, self.close = GrammarsCompiled(self.compiler.submit), self.compiler.close
        scheduler.set_plugins([*scheduler.plugins, self.queue])
