"""Chapter 1 in 25 lines: a loop that batches. Run it: `python 01_batching/small_batching.py`.

See 01_batching/README.md#the-idea-in-one-small-file"""

from collections import deque

from engine_core import EngineCore
from fcfs_scheduler import FCFSScheduler
from input_batch import RunnerState
from request import Request
from scheduler_interface import FinishedStep, StepOutput

PROMPTS = {"a": [3, 1, 4], "b": [2], "c": [7, 1], "d": [8, 2, 8, 1], "e": [5]}
MAX_TOKENS = {"a": 4, "b": 2, "c": 1, "d": 3, "e": 2}  # how many tokens each may generate
MAX_NUM_SEQS = 2


def model(tokens):  # stands for a model: returns the next token
    return (5 * tokens[-1] + len(tokens)) % 10


waiting, running = deque(PROMPTS), []
tokens = {name: list(prompt) for name, prompt in PROMPTS.items()}  # known: prompt, then outputs
num_computed = dict.fromkeys(PROMPTS, 0)  # how many of them the model has seen
steps = []  # number of tokens computed per request
while waiting or running:
    while waiting and len(running) < MAX_NUM_SEQS:  # a free slot is filled immediately
        running.append(waiting.popleft())
    batch = {name: tokens[name][num_computed[name] :] for name in running}
    print(f"step {len(steps)}: computes {batch}")
    steps.append({name: len(new) for name, new in batch.items()})
    for name in running:  # a real model takes all rows of the batch in one pass
        num_computed[name] = len(tokens[name])
        tokens[name].append(model(tokens[name]))
    running = [n for n in running if len(tokens[n]) < len(PROMPTS[n]) + MAX_TOKENS[n]]


# Compare with the chapter's classes.
class SmallRunner(RunnerState):
    def execute(self, plan):
        real_steps.append(plan.num_scheduled_tokens)
        self.apply(plan)
        known = {name: self.requests[name] for name in plan.num_scheduled_tokens}
        sampled = {name: [model(r.tokens(0, r.num_tokens))] for name, r in known.items()}
        return FinishedStep(StepOutput(sampled))


real_steps = []
core = EngineCore(FCFSScheduler(max_num_seqs=MAX_NUM_SEQS), SmallRunner())
requests = [Request.from_tokens(n, PROMPTS[n], max_new_tokens=MAX_TOKENS[n]) for n in PROMPTS]
for request in requests:
    core.add_request(request)
while core.has_unfinished_requests():
    core.step()
assert {request.request_id: request.all_token_ids for request in requests} == tokens
assert real_steps == steps
print("engine_core.py says the same")
