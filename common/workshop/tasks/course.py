"""All tasks, evening by evening."""

from __future__ import annotations

from common.workshop.tasks import (
    tasks_batching,
    tasks_chunks,
    tasks_paged_kv,
    tasks_prefix_cache,
    tasks_scheduler,
    tasks_speculation,
)
from common.workshop.tasks.blank import Blank, make_blank
from common.workshop.tasks.task import Task

TASKS: tuple[Task, ...] = (
    *tasks_batching.TASKS,
    *tasks_paged_kv.TASKS,
    *tasks_prefix_cache.TASKS,
    *tasks_scheduler.TASKS,
    *tasks_speculation.TASKS,
    *tasks_chunks.TASKS,
)
EVENINGS = {
    1: "Batching",
    2: "Paged KV",
    3: "Prefix cache",
    4: "Scheduler",
    5: "Speculative decoding",
    6: "Chunked prefill",
}


def task_numbered(number: str) -> Task | None:
    return next((task for task in TASKS if task.number == number), None)


def blank_of(task: Task) -> Blank:
    return make_blank(task.source(), task.place, task.names, task.title, task.write, task.number)
