"""Exhibits of chapter 6: a prompt in pieces."""

from __future__ import annotations

from common.workshop.museum.exhibit import Exhibit, Guest, Workload
from common.workshop.museum.props import CODE, say


def a_piece_that_sees_its_future() -> str:
    prompt = (
        "def area(width, height):\n    return width * height\n\ndef volume(width, height, depth):\n"
    )
    whole, pieces = say([prompt]), say([prompt], chunked_prefill=8)
    return f"whole:     {whole[0]}\nin pieces: {pieces[0]}"


EXHIBITS = (
    Exhibit(
        trap=28,
        origin="nano-vllm #212 #213",
        title="A piece of a prompt reads what is not written yet",
        seen="A chunk was told the length of the whole prompt instead of its own end. Its tokens "
        "attended to slots behind them that nobody had written: KV of an earlier tenant. Short "
        "prompts were right, long ones fluent and wrong.",
        lesson="A chunk ends where it ends: `start + num_tokens`. Fill unused slots with NaN in "
        "tests, and whoever reads one is found.",
        demonstrate=a_piece_that_sees_its_future,
        wrong='whole:     \'"""Show a bit of X-level widget for\'\n'
        'in pieces: \'"""Shift the height of the window in a Tk\'',
        right='whole:     \'"""Show a bit of X-level widget for\'\n'
        'in pieces: \'"""Show a bit of X-level widget for\'',
        watch=Workload(
            look="The prompt comes in pieces of six. Read the tokens of step 11.",
            parts="step 11, computed, a",
            guests=(Guest("a", CODE, 12),),
            config={"chunked_prefill": 6},
        ),
    ),
)
