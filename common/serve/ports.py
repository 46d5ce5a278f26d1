"""The port of a server: taken before anything is loaded."""

from __future__ import annotations

import socket


def open_port(host: str, port: int) -> socket.socket:
    """Taken, but nobody is listened to yet. Raises `OSError`, and `ValueError` for a number that is
    no port."""
    if not 0 <= port <= 65535:
        raise ValueError("ports must be numbers from 0 to 65535")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With a protocol, asyncio sets TCP_NODELAY for those who come: else pieces wait 40 ms for each
    # other.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except BaseException:
        listener.close()
        raise
    return listener
