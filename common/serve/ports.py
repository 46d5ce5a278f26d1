"""The server's port, bound before the model is loaded.

See common/serve/README.md"""

from __future__ import annotations

import socket


def open_port(host: str, port: int) -> socket.socket:
    """Return a socket that is bound but does not listen yet. Raises `OSError`, and `OverflowError`
    for an invalid port number."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With an explicit protocol, asyncio sets TCP_NODELAY on accepted connections; otherwise small
    # packets wait 40 ms for each other.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    return listener
