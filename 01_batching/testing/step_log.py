"""Step logs: what a scheduler must decide, step by step, in a text file that is written by hand.

A case is a title and an indented script: options of the scheduler, if there are any, and actions
with `;` between them. `fcfs_plans.txt` says how to read one; besides, `-` is a step that schedules
nothing, and `+a9 refused: WORDS` expects a `ValueError` with these words. Logs of later chapters
have more (`04_scheduler/plans.txt`).

No command writes a log: write the case first, then the code."""

from __future__ import annotations

import random
import re
from ast import literal_eval
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from bounded_loops import as_long_as
from request import Request
from scheduler_interface import SchedulerOutput, StepOutput

VOCAB_SIZE = 9
OPTIONS = re.compile(r"[a-z_]+=\S+(\s+[a-z_]+=\S+)*")
# +b=a8+1/4:5@x: name, other name, tokens, own tokens, outputs, priority, adapter
REQUEST = re.compile(r"\+([a-z]+)(?:=([a-z]+))?(\d+)(?:\+(\d+))?(?:/(\d+))?(?::(\d+))?(?:@(\w+))?")


def next_token(token_ids: Sequence[int]) -> int:
    """The fake model: any change of any token, or of their number, changes the next one."""
    return random.Random(repr(list(token_ids))).randrange(VOCAB_SIZE)


# -- the file


@dataclass(frozen=True)
class Case:
    title: str
    options: dict[str, Any] = field(default_factory=dict)
    actions: list[str] = field(default_factory=list)


def read_cases(path: Path) -> Iterator[Case]:
    """The cases of a log. Lines that begin with `#` are comments."""
    case = None
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        if not line[0].isspace():
            if case is not None:
                yield case
            case = Case(line.strip())
            continue
        assert case is not None, f"{path.name}: a script without a title: {line}"
        for action in filter(None, map(str.strip, line.split(";"))):
            if OPTIONS.fullmatch(action):
                case.options.update(map(parse_option, action.split()))
            else:
                case.actions.append(action)
    if case is not None:
        yield case


def parse_option(word: str) -> tuple[str, Any]:
    """`name=value`; a value that is not a Python literal is a string."""
    name, _, value = word.partition("=")
    try:
        return name, literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def cases_of(path: Path) -> pytest.MarkDecorator:
    """Run a test with each `case` of a log. Its title is the id."""
    cases = list(read_cases(path))
    titles = [case.title for case in cases]
    assert len(set(titles)) == len(titles), f"{path.name}: two cases have one title"
    return pytest.mark.parametrize("case", cases, ids=titles)


# -- a scheduler and its fake model


class StepLoop:
    """A scheduler and a fake model that reads the tokens of the scheduler's own requests. All
    invariants are checked after every step."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.finished: list[Request] = []

    def take(self, request: Request) -> Request:
        self.scheduler.add_request(request)
        self.requests[request.request_id] = request
        self.outputs[request.request_id] = []
        return request

    def schedule(self) -> Any:
        plan = self.scheduler.schedule()
        assert plan.total_num_scheduled_tokens <= self.scheduler.max_num_batched_tokens
        return plan

    def execute(self, plan: Any) -> StepOutput:
        computed = (r for r in plan.scheduled_requests if r.num_computed_tokens == r.num_tokens)
        return StepOutput({r.request_id: [next_token(r.all_token_ids)] for r in computed})

    def receive(self, plan: Any, sampled: StepOutput) -> None:
        requests = {request.request_id: request for request in plan.scheduled_requests}
        for result in self.scheduler.update_from_output(plan, sampled):
            self.outputs[result.request_id] += result.new_token_ids
            if result.finish_reason:
                self.reasons[result.request_id] = result.finish_reason
                self.finished.append(requests[result.request_id])

    def update(self, plan: Any) -> None:
        self.receive(plan, self.execute(plan))
        self.check()

    def check(self) -> None:
        self.scheduler.check_invariants()

    def step(self) -> Any:
        plan = self.schedule()
        self.update(plan)
        return plan

    def run(self, max_steps: int = 500) -> None:
        for _ in as_long_as(self.scheduler.has_unfinished_requests, max_steps):
            self.step()

    def continuation(self, request: Request) -> list[int]:
        """The outputs of a request that runs alone to its `max_tokens`."""
        tokens = list(request.prompt_token_ids)
        for _ in range(request.max_tokens):
            tokens.append(next_token(tokens))
        return tokens[request.num_prompt_tokens :]


# -- performing a script


class StepLog:
    """Performs scripts on a loop. A later chapter derives from it what it adds."""

    def __init__(self, loop: StepLoop) -> None:
        self.loop = loop

    def perform(self, case: Case) -> None:
        """Perform the script. Fails at the first action that does not happen as it is written."""
        for number, action in enumerate(case.actions):
            performed = self.act(action)
            assert performed == action, f"action {number} of {case.title}"

    def act(self, action: str) -> str:
        """Perform one action. Returns what happened, in the words of the log."""
        if " refused: " in action:
            return self.add_refused(*action.split(" refused: "))
        if action.startswith("+"):
            for word in action.split():
                self.loop.take(self.make_request(word))
        elif action.startswith("~"):
            self.loop.scheduler.abort_request(action[1:])
        elif action == "end":
            self.loop.run()
            self.check_end()
        else:
            return self.steps(action)
        return action

    def make_request(self, word: str) -> Request:
        """Make the request that is added by a word. Its prompt begins with its name, so that no two
        share a prefix unless the word says so."""
        found = REQUEST.fullmatch(word)
        assert found is not None, f"cannot read {word!r}"
        name, other, length, num_own, max_tokens, priority, _ = found.groups()
        prompt = [*map(ord, name), *range(int(length) - len(name))]
        if other is not None:
            shared = self.loop.requests[other].all_token_ids[: int(length)]
            prompt = shared + [ord(name[0])] * int(num_own or 0)
        return self.new_request(name, prompt, int(max_tokens or 8), int(priority or 0))

    def new_request(self, name: str, prompt: list[int], max_tokens: int, priority: int) -> Request:
        return Request.from_tokens(name, prompt, max_tokens, priority)

    def add_refused(self, word: str, reason: str) -> str:
        known = list(self.loop.scheduler.requests)
        try:
            self.loop.scheduler.add_request(self.make_request(word))
        except ValueError as error:
            assert list(self.loop.scheduler.requests) == known, "a refused request was added"
            return f"{word} refused: {reason if reason in str(error) else error}"
        return word

    def steps(self, action: str) -> str:
        """Run a step, or as many as a number before `*` says: all must be equal."""
        count, _, written = action.rpartition("* ")
        done = [self.step(written) for _ in range(int(count or 1))]
        performed = " or ".join(dict.fromkeys(done))
        return f"{count}* {performed}" if count else performed

    def step(self, written: str) -> str:
        return self.describe(self.loop.step())

    def describe(self, plan: SchedulerOutput) -> str:
        words = [f"{name}{num_tokens}" for name, num_tokens in plan.num_scheduled_tokens.items()]
        return " ".join(words or ["-"])

    def check_end(self) -> None:
        """Check that each request that was not aborted got the tokens that it gets alone."""
        for name in self.loop.reasons:
            assert self.loop.outputs[name] == self.loop.continuation(self.loop.requests[name]), name
