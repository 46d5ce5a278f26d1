"""Chapter 4 in 47 lines: two phases and a victim.

Run it: `python 04_scheduler/small_scheduler.py`.

See 04_scheduler/README.md#the-idea-in-one-small-file"""

from block_pool import BlockPool
from kv_memory import UncachedKVCacheManager
from request import Request
from scheduler import Scheduler
from scheduler_interface import StepOutput

BLOCK_SIZE, NUM_BLOCKS = 4, 4  # 4 usable blocks: no null block here
BUDGET = 16  # tokens of a step
PROMPT_LENS = {"a": 7, "b": 7, "c": 2}
NUM_OUTPUTS = {"a": 4, "b": 3, "c": 1}

waiting, running = list(PROMPT_LENS), []
known, computed = dict(PROMPT_LENS), dict.fromkeys(PROMPT_LENS, 0)  # numbers of tokens
num_blocks = dict.fromkeys(PROMPT_LENS, 0)  # blocks that each request holds


def allocate_blocks(name, num_tokens):
    """Allocate slots for `num_tokens` more tokens. Returns False if too few blocks are free."""
    missing = -(-(computed[name] + num_tokens) // BLOCK_SIZE) - num_blocks[name]
    if missing > NUM_BLOCKS - sum(num_blocks.values()):
        return False
    num_blocks[name] += max(missing, 0)
    return True


steps = []
while waiting or running:
    plan, victims = {}, []
    budget = BUDGET
    for name in list(running):  # phase 1: running requests
        while name in running and not allocate_blocks(name, known[name] - computed[name]):
            victim = running.pop()  # the most recently admitted request loses its KV
            num_blocks[victim] = computed[victim] = 0
            waiting.insert(0, victim)
            victims.append(victim)
        if name in running:
            plan[name] = known[name] - computed[name]
            budget -= plan[name]
    while waiting:  # phase 2: waiting requests, in order
        num_tokens = known[waiting[0]]
        if num_tokens > budget or not allocate_blocks(waiting[0], num_tokens):
            break  # stop at the first request that does not fit, so none overtakes it
        running.append(waiting.pop(0))
        plan[running[-1]] = num_tokens
        budget -= num_tokens
    steps.append((plan, victims))
    print(f"step {len(steps)}: computes {plan}" + (f", preempts {victims}" if victims else ""))
    for name, num_tokens in plan.items():  # each request gets one token
        computed[name] += num_tokens
        known[name] += 1
    for name in [n for n in running if known[n] == PROMPT_LENS[n] + NUM_OUTPUTS[n]]:
        running.remove(name)
        num_blocks[name] = 0

# Compare with the chapter's class, over a memory without a prefix cache. (Block 0 is the null
# block.)
memory = UncachedKVCacheManager(BlockPool(NUM_BLOCKS + 1), BLOCK_SIZE)
scheduler = Scheduler(max_num_batched_tokens=BUDGET, kv_memory=memory)
for name, length in PROMPT_LENS.items():
    request = Request.from_tokens(name, [50] * length, max_new_tokens=NUM_OUTPUTS[name])
    scheduler.add_request(request)
for plan, victims in steps:
    real = scheduler.schedule()
    assert real.num_scheduled_tokens == plan, (real.num_scheduled_tokens, plan)
    assert [request.request_id for request in real.preempted_requests] == victims
    scheduler.update_from_output(real, StepOutput({name: [50] for name in plan}))
assert not scheduler.has_unfinished_requests()
print("scheduler.py says the same")
