"""Engine plugins: features on the engine's side, notified of requests and steps by hooks.

A feature that every engine can have, such as grammars, is made when the first request has it
(`LAZY_ENGINE_PLUGINS`). The scheduler and the runner have plugins of their own.

See common/README.md"""

from __future__ import annotations

from collections.abc import Mapping

from request import Request


class EnginePlugin:
    """The hooks, which do nothing. A plugin overrides those it needs."""

    def on_add(self, request: Request) -> None:
        """The scheduler gets this request next, and may refuse it."""

    def on_finish(self, request: Request) -> None:
        """All samples of the request's group have ended, or it was refused. Called again after an
        interrupt."""

    def failed_requests(self) -> Mapping[str, str]:
        """Requests that can never start, with the reason."""
        return {}

    def wait(self, seconds: float) -> bool:
        """Wait for something that a request needs to start. Returns False if none needs anything
        of this plugin."""
        return False

    def between_steps(self) -> None:
        """State of requests was changed: in a step, or outside."""

    def flush(self) -> None:
        """A step has ended."""

    def on_error(self, error: BaseException | None) -> None:
        """A call was interrupted: running requests end next."""

    def close(self) -> None:
        """The engine computes nothing afterwards."""
