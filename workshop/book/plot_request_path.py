"""The path of one request through the files, as a picture; and its way through a server.

    python workshop/book/plot_request_path.py

Writes `request_path.svg`, which `common/README.md` shows, and `http_path.svg`, which
`common/serve/README.md` shows, to `workshop/figures`. Nothing is measured.
"""

from __future__ import annotations

from workshop.book.draw import LARGE, PAPER, SMALL, SOFT, Drawing, save_all
from workshop.book.draw_parts import Lanes
from workshop.book.palette import DECODE, tint

CHAPTER = tint(DECODE, 0.45)
# x, y of the upper left corner, width, height, colour, file, what it does
BOXES = {
    "llm": (24, 62, 140, 84, SOFT, "llm.py", "generate, stream"),
    "engine": (248, 62, 216, 84, SOFT, "engine.py", "add_request, step, abort"),
    "intake": (548, 62, 268, 62, SOFT, "input_processor.py, tokenizer.py",
               "text in: checked, a Request"),
    "outputs": (548, 142, 268, 62, SOFT, "output_processor.py, tokenizer.py",
                "text out: characters, stops"),
    "loop": (24, 232, 792, 376, PAPER, "", ""),
    "scheduler": (36, 292, 250, 96, CHAPTER, "scheduler.py", "chapter 4\n(5: drafts, 6: chunks)"),
    "memory": (36, 476, 250, 112, CHAPTER, "cached_kv_cache_manager.py",
               "chapter 3: prefixes\nchapter 2: blocks"),
    "runner": (332, 292, 214, 96, SOFT, "runner/model_runner.py",
               "the delta becomes tensors\n(5: and guesses, around it)"),
    "model": (332, 476, 214, 112, SOFT, "model.py",
              "attention through tables:\nchapter 2, mixed: chapter 6"),
    "update": (632, 292, 176, 96, CHAPTER, "base_scheduler.py",
               "chapter 1: who has\nended, what is new"),
    "sampler": (612, 476, 196, 112, SOFT, "sampling/sampler.py", "logits become\ntoken ids"),
}  # fmt: skip
# The points of an arrow, what goes along, and where that is written.
ARROWS = [
    (((164, 100), (248, 100)), "prompts", (206, 88)),
    (((464, 84), (548, 84)), "text", (506, 72)),
    (((548, 172), (506, 172), (506, 126), (464, 126)), "output", (506, 186)),
    (((300, 146), (300, 206), (157, 206), (157, 292)), "Request", (228, 192)),
    (((157, 388), (157, 476)), "how many blocks?", (230, 432)),
    (((286, 340), (332, 340)), "plan", (309, 326)),
    (((420, 388), (420, 476)), "tokens, tables", (478, 432)),
    (((546, 532), (612, 532)), "logits", (579, 518)),
    (((700, 476), (700, 432), (576, 432), (576, 370), (546, 370)), "ids", (640, 418)),
    (((546, 326), (632, 326)), "StepOutput", (589, 312)),
    (((716, 292), (716, 204)), "new token ids", (664, 218)),
]  # fmt: skip


def draw_path() -> Drawing:
    drawing = Drawing(
        840,
        626,
        "The path of one request through the files",
        "A prompt goes through llm.py and engine.py to the scheduler. A step: plan, run, update. "
        "New token ids become text and go back.",
    )
    drawing.text(24, 32, "One request through the files", size=LARGE, bold=True)
    drawing.key(548, 33, {"common": SOFT, "a chapter": CHAPTER})
    for x, y, width, height, fill, title, text in BOXES.values():
        drawing.box(x, y, width, height, text, title=title, fill=fill, size=SMALL)
    loop = "engine_core.py, chapter 1: one step = schedule, execute, update"
    drawing.text(420, 256, loop, size=SMALL, anchor="middle")
    for points, what, (x, y) in ARROWS:
        drawing.arrow(*points)
        drawing.text(x, y, what, size=SMALL, anchor="middle", muted=True)
    return drawing


# From lane to lane what goes along, dashed where it is an answer; in one lane what its files do.
# What begins with a bar is at the same time as what stands above it.
CLIENT, LOOP, ENGINE = "client", "event loop", "the engine's thread"
TALK = [
    (CLIENT, LOOP, "POST"),
    (LOOP, LOOP, "gate.py: key, host, size of the body\nwire.py: fields to SamplingParams, or 400\n"
                 "app.py: text to token ids; too long: 400"),
    (LOOP, ENGINE, "inbox: add(id, token ids)"),
    (ENGINE, ENGINE, "engine_loop.py: obeys the inbox"),
    (ENGINE, LOOP, "HandOver: accepted, or why not"),
    (LOOP, CLIENT, "200"),
    (ENGINE, ENGINE, "|engine.step(): chapters 1 to 6"),
    (ENGINE, ENGINE, "deltas.py: new token ids to text"),
    (ENGINE, LOOP, "HandOver: what the step brought to all"),
    (LOOP, LOOP, "async_llm.py: to each request's mailbox\nanswers.py: a delta to JSON"),
    (ENGINE, ENGINE, "|engine.step(), and so on"),
    (LOOP, CLIENT, "data: {...}"),
    (CLIENT, LOOP, "gone"),
    (LOOP, LOOP, "streams.py: generate() is closed"),
    (LOOP, ENGINE, "inbox: abort(id)"),
    (ENGINE, ENGINE, "free blocks, before the next step"),
]  # fmt: skip


def draw_http() -> Drawing:
    drawing = Drawing(
        860,
        700,
        "The way of one HTTP request",
        "The event loop checks a request and puts it into the inbox of the engine's thread, which "
        "obeys between two steps and hands over once a step what came to all requests. When the "
        "client is gone, the request is aborted.",
    )
    drawing.text(24, 30, "One request through the server's process", size=LARGE, bold=True)
    drawing.key(560, 31, {"the chapters": CHAPTER})
    lanes = Lanes(drawing, {CLIENT: 64, LOOP: 326, ENGINE: 694}, 114, 288)
    lanes.widths = {CLIENT: 80}
    begin = lanes.y
    for start, stop, text in TALK:
        end = lanes.y
        lanes.y = begin = begin if text.startswith("|") else end
        text = text.removeprefix("|")
        if start == stop:
            fill = CHAPTER if text.startswith("engine.step") else SOFT
            lanes.note(start, text, width=310 if start == LOOP else 288, fill=fill)
        elif text.startswith(("HandOver", "200", "data")):
            lanes.returns(start, stop, text)
        else:
            lanes.call(start, stop, text)
        lanes.y = max(lanes.y, end)
    lanes.draw_lanes(52, lanes.y)
    drawing.height = lanes.y + 12
    return drawing


DRAWINGS = {"request_path": draw_path, "http_path": draw_http}

if __name__ == "__main__":
    save_all(DRAWINGS, __file__)
