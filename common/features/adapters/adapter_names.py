"""`AdapterNames`: the loaded adapters by the names that requests use.

    name --> digest of the content --> matrices, in the process that has the model

A name can be removed at any time; the content stays until the last request that uses it has ended.
KV is keyed by the digest, so a later adapter of the same name never finds the first one's KV.

See 04_scheduler/beyond/ADAPTERS.md"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from request import Request


class AdapterLoader(Protocol):
    """Loads adapters in the process that has the model, or on every rank."""

    def load(self, directory: str | Path) -> str:
        """Read an adapter for future steps, and return its digest. Raises `ValueError` and
        `FileNotFoundError`."""
        ...

    def drop(self, digest: str) -> None:
        """Remove an adapter from memory. No future step uses it; one in flight may still do so."""
        ...


class AdapterNames:
    """The names, and the requests that use each adapter. `wait_for_steps` waits until no step in
    flight can use the adapter that is dropped next."""

    def __init__(self, loader: AdapterLoader, wait_for_steps: Callable[[], object]) -> None:
        self._loader = loader
        self._wait_for_steps = wait_for_steps
        self._digests: dict[str, str] = {}  # by name
        self._users: dict[str, set[str]] = {}  # by digest: unfinished requests

    @property
    def names(self) -> list[str]:
        return list(self._digests)

    def load(self, name: str, directory: str | Path) -> None:
        """Load an adapter under a name. Raises `ValueError`, and changes nothing, if the name is in
        use or the adapter cannot be computed."""
        if not isinstance(name, str) or not name:
            raise ValueError(f"name must be a non-empty str, got {name!r}")
        if name in self._digests:
            raise ValueError(
                f"name must be unused, got {name!r}; unload the adapter of this name first"
            )
        if not isinstance(directory, str | Path):
            raise ValueError(f"directory must be a path, got {directory!r}")
        self._drop_unused()
        digest = self._loader.load(directory)
        self._users.setdefault(digest, set())
        self._digests[name] = digest

    def unload(self, name: str) -> None:
        """Remove a name; requests keep the adapter. Raises `ValueError` for an unknown name."""
        self.digest_of(name)
        del self._digests[name]
        self._drop_unused()

    def digest_of(self, name: str) -> str:
        if not isinstance(name, str) or name not in self._digests:
            loaded = ", ".join(map(repr, self._digests)) or "none"
            raise ValueError(f"adapter must be one of those loaded ({loaded}), got {name!r}")
        return self._digests[name]

    @property
    def by_digest(self) -> dict[str, list[str]]:
        """The names of each content. A content without a name, which only unfinished requests
        still use, is not in it."""
        found: dict[str, list[str]] = {}
        for name, digest in list(self._digests.items()):
            found.setdefault(digest, []).append(name)
        return found

    def on_add(self, request: Request) -> None:
        if (digest := request.features.get("adapter")) is not None:
            self._users[digest].add(request.request_id)

    def on_finish(self, request: Request) -> None:
        if (digest := request.features.get("adapter")) in self._users:
            self._users[digest].discard(request.request_id)
            self._drop_unused()

    def _drop_unused(self) -> None:
        """Drop adapters without a name or a request. Safe to interrupt and call again."""
        named = set(self._digests.values())
        unused = [d for d, users in self._users.items() if not users and d not in named]
        for digest in unused:
            with suppress(Exception):  # a step's error, raised later by its own caller
                self._wait_for_steps()
            self._loader.drop(digest)
            del self._users[digest]
