"""Exhibits of chapter 6: a prompt in chunks."""

from __future__ import annotations

from workshop.practice.examples.example_tools import say


def a_piece_that_sees_its_future() -> str:
    prompt = (
        "def area(width, height):\n    return width * height\n\ndef volume(width, height, depth):\n"
    )
    whole, pieces = say([prompt]), say([prompt], chunked_prefill=8, block_size=64)
    return f"whole:     {whole[0]}\nin chunks: {pieces[0]}"
