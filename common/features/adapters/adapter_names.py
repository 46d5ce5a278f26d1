"""Adapters by the names that requests have for them.

    name --> digest of the content --> matrices, where the model is

A name may go at any time; the content stays until the last request that uses it has ended. KV is
keyed by the digest: another adapter that gets the name later finds nothing of the first one's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol


class Loading(Protocol):
    """An adapter that is being read, while steps go on. The rest is said between two steps."""

    def is_over(self) -> bool: ...

    def digest(self) -> str:
        """Of its content; waits for it. Raises `ValueError` and `FileNotFoundError`."""
        ...

    def take(self) -> None:
        """Into memory, for the steps to come."""
        ...

    def forget(self) -> None:
        """Nobody will take it, or has."""
        ...


class AdapterLoader(Protocol):
    """Where the model is: here, or on every rank."""

    def begin(self, directory: str | Path) -> Loading: ...

    def drop(self, digest: str) -> None:
        """Out of it. No step to come uses it; one that is under way may."""
        ...


class AdapterNames:
    """`wait_for_steps`: until none that is under way could use what is dropped then."""

    def __init__(self, loader: AdapterLoader, wait_for_steps: Callable[[], object]) -> None:
        self._loader, self._wait_for_steps = loader, wait_for_steps
        self._digests: dict[str, str] = {}  # by name
        self._users: dict[str, set[str]] = {}  # by digest: unfinished requests

    @property
    def names(self) -> list[str]:
        return list(self._digests)

    def load(self, name: str, directory: str | Path) -> None:
        """Raises `ValueError`, and changes nothing, for a name that is taken and an adapter that
        can not be computed."""
        self.end_load(name, self.begin_load(name, directory))

    def begin_load(self, name: str, directory: str | Path) -> Loading:
        """What `end_load` wants: steps may come between."""
        self._check_is_free(name)
        if not isinstance(directory, str | Path):
            raise ValueError(f"directory must be a path, got {directory!r}")
        self._drop_unused()
        return self._loader.begin(directory)

    def end_load(self, name: str, loading: Loading) -> None:
        try:
            self._check_is_free(name)  # another one may have been faster
            digest = loading.digest()
            self._users.setdefault(digest, set())  # of what stands here alone, the next call
            loading.take()  # drops the content
            self._digests[name] = digest
        except BaseException:
            loading.forget()
            raise

    def _check_is_free(self, name: str) -> None:
        if not isinstance(name, str) or not name:
            raise ValueError(f"name must be a non-empty str, got {name!r}")
        if name in self._digests:
            raise ValueError(
                f"name must be unused, got {name!r}; unload the adapter of this name first"
            )

    def unload(self, name: str) -> None:
        """Requests that use it go on. Raises `ValueError` for a name that is not there."""
        self.digest_of(name)
        del self._digests[name]
        self._drop_unused()

    def digest_of(self, name: str) -> str:
        if not isinstance(name, str) or name not in self._digests:
            there = ", ".join(map(repr, self._digests)) or "none"
            raise ValueError(f"adapter must be one of those loaded ({there}), got {name!r}")
        return self._digests[name]

    def name_of(self, digest: str) -> str | None:
        """The first, if it has several. None: it is used to its end, and nobody else gets it."""
        return next((name for name, found in self._digests.items() if found == digest), None)

    def begin(self, digest: str, request_id: str) -> None:
        self._users[digest].add(request_id)

    def end(self, digest: str, request_id: str) -> None:
        """May be said again."""
        if digest in self._users:
            self._users[digest].discard(request_id)
            self._drop_unused()

    def _drop_unused(self) -> None:
        """May be interrupted, and done again."""
        named = set(self._digests.values())
        unused = [d for d, users in self._users.items() if not users and d not in named]
        for digest in unused:
            with suppress(Exception):  # a step's, who says it in its turn
                self._wait_for_steps()
            self._loader.drop(digest)
            del self._users[digest]
