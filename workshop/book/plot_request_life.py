"""A request's life, and who calls whom in a step.

    python workshop/book/plot_request_life.py

`test_request_life.py` compares the calls with those of a step of the engine.
"""

from __future__ import annotations

from request import RequestStatus
from workshop.book.draw import LARGE, PAPER, SMALL, SOFT, Drawing, save_all
from workshop.book.draw_parts import Lanes
from workshop.book.palette import CACHED, DECODE, PREEMPTED, PROMPT, tint

GROUPS = {
    "waits": [s for s in RequestStatus if s.name.startswith("WAITING")],
    "preempted": [RequestStatus.PREEMPTED],
    "runs": [RequestStatus.RUNNING],
    "ended": [status for status in RequestStatus if status.name.startswith("FINISHED")],
}
# From lane, to lane, what is called, and the function as a step of the engine runs it. No function:
# what is returned. The same lane twice: what it does by itself.
CALLS = [
    ("LLMEngine", "EngineCore", "step", "EngineCore.step"),
    ("EngineCore", "Scheduler", "schedule", "Scheduler.schedule"),
    ("Scheduler", "KV memory", "get_computed_blocks", "CachedKVCacheManager.get_computed_blocks"),
    ("Scheduler", "KV memory", "allocate_slots", "CachedKVCacheManager.allocate_slots"),
    ("Scheduler", "EngineCore", "plan", ""),
    ("EngineCore", "Runner", "execute(plan)", "PagedModelRunner.execute"),
    ("Runner", "Runner", "lays out", "compose"),
    ("Runner", "Model", "forward", "DecoderModel.forward"),
    ("Runner", "Sampler", "begin", "UnreadStep.begin"),
    ("EngineCore", "Runner", "handle.wait()", "UnreadStep.wait"),
    ("Runner", "EngineCore", "token ids", ""),
    ("EngineCore", "Scheduler", "update_from_output", "SchedulerBase.update_from_output"),
    ("LLMEngine", "LLMEngine", "process", "OutputProcessor.process"),
]


def draw_life() -> Drawing:
    drawing = Drawing(
        840,
        330,
        "A request's life",
        "add_request puts it into the queue; admission lets it run; each step computes some of its "
        "tokens; it may be preempted and come back; it ends by a stop, a length or an abort.",
    )
    drawing.text(24, 30, "A request's life", size=LARGE, bold=True)
    size = {"waits": (30, 110, 250), "runs": (390, 110, 150), "ended": (640, 72, 176),
            "preempted": (390, 236, 150)}  # fmt: skip
    fills = {"waits": SOFT, "runs": tint(DECODE, 0.6), "ended": PAPER,
             "preempted": tint(PREEMPTED, 0.5)}  # fmt: skip
    boxes = {}
    for name, (x, y, width) in size.items():
        names = [status.name.removeprefix("FINISHED_") for status in GROUPS[name]]
        label = "\n".join(names) if name != "preempted" and name != "runs" else ""
        height = 34 + 18 * len(label.split("\n")) if label else 48
        boxes[name] = drawing.box(
            x, y, width, height, label, title=name, fill=fills[name], size=SMALL
        )
    waits, runs, out = (boxes[name] for name in ("waits", "runs", "preempted"))
    y = runs.middle[1]
    drawing.arrow((280, y), runs.left)
    drawing.text(335, y - 14, "admission", size=SMALL, anchor="middle")
    drawing.arrow(runs.right, (640, y))
    drawing.text(590, y - 14, "last token", size=SMALL, anchor="middle")
    drawing.arrow((430, 110), (430, 84), (500, 84), (500, 110))
    drawing.text(465, 68, "a step: some tokens computed", size=SMALL, anchor="middle")
    drawing.arrow(runs.bottom, out.top)
    drawing.text(476, 196, "its KV is taken", size=SMALL)
    drawing.arrow(out.left, (155, out.middle[1]), (155, waits.bottom[1]))
    drawing.text(170, out.middle[1] + 18, "tokens kept, in front\nof the queue", size=SMALL)
    drawing.arrow((80, 72), (80, 110))
    drawing.text(92, 82, "add_request", size=SMALL, mono=True)
    return drawing


def draw_calls() -> Drawing:
    drawing = Drawing(
        860,
        700,
        "Who calls whom in a step",
        "A sequence: the engine asks the core for a step; the core asks the scheduler for a plan "
        "and the runner to compute it, waits for token ids, and gives them to the scheduler.",
    )
    drawing.text(24, 30, "Who calls whom in a step", size=LARGE, bold=True)
    x = {"LLMEngine": 66, "EngineCore": 190, "Scheduler": 350, "KV memory": 530, "Runner": 636,
         "Model": 724, "Sampler": 806}  # fmt: skip
    fills = {"Scheduler": tint(PROMPT, 0.3), "KV memory": tint(CACHED, 0.35),
             "Model": tint(DECODE, 0.5), "Runner": tint(DECODE, 0.25)}  # fmt: skip
    lanes = Lanes(drawing, x, 120, 102, fills)
    lanes.widths = {"Model": 66, "Sampler": 80, "Runner": 80}
    for start, stop, what, function in CALLS:
        if start == stop:
            lanes.note(start, what, width=88)
        elif function:
            lanes.call(start, stop, what)
        else:
            lanes.returns(start, stop, what)
    lanes.draw_lanes(54, lanes.y)
    drawing.height = lanes.y + 20
    return drawing


DRAWINGS = {"request_life": draw_life, "step_calls": draw_calls}

if __name__ == "__main__":
    save_all(DRAWINGS, __file__)
