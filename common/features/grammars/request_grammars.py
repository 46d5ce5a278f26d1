"""The scheduler's side of grammars, made when the first request with a grammar arrives.

See 04_scheduler/beyond/GRAMMARS.md#who-does-what-and-when"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from base_scheduler import BaseScheduler
from common.features.grammars.grammar_compiler import GrammarCompiler
from common.features.grammars.vocabulary import Vocabulary
from common.models.loader import resolve_checkpoint
from common.requests.tokenizer import Tokenizer, load_tokenizer
from grammar_queue import GrammarsCompiled
from request import Request


class RequestGrammars:
    """The grammars of an engine's requests. Adds `queue` to the end of the scheduler's plugins.
    `rank_checkpoint` is the checkpoint of ranks in other processes, which use its tokenizer. Raises
    `ValueError` if the engine's tokenizer is another one."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        scheduler: BaseScheduler,
        rank_checkpoint: str | Path | None,
    ) -> None:
        vocabulary = Vocabulary.of(tokenizer, vocab_size, eos_token_ids)
        if rank_checkpoint is not None:
            rank_tokenizer = load_tokenizer(resolve_checkpoint(rank_checkpoint))
            if vocabulary != Vocabulary.of(rank_tokenizer, vocab_size, eos_token_ids):
                raise ValueError(
                    "grammar must be None over several ranks without the checkpoint's tokenizer"
                )
        self.compiler = GrammarCompiler(vocabulary)
        self.queue = GrammarsCompiled(self.compiler.submit)
        scheduler.set_plugins([*scheduler.plugins, self.queue])

    def on_add(self, request: Request) -> None:
        self.queue.arrived(request)

    def on_finish(self, request: Request) -> None:
        self.queue.on_finish(request)  # the scheduler does not know a request that it refused

    def failed_requests(self) -> Mapping[str, str]:
        return self.queue.failed()

    def wait(self, seconds: float) -> bool:
        return self.queue.wait(seconds)

    def close(self) -> None:
        self.compiler.close()
