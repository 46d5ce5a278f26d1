# %% [markdown]
# # Stepping a scheduler by hand
#
# Everything here is imported from the chapter. We play the model: a request whose known tokens are
# all computed gets token 7. No tensors are needed, and every cell takes milliseconds.
#
# **中文提要**：手动一步一步推动调度器。两个请求，四个块：显存用完，后到的请求被抢占（preemption），
# 之后恢复运行。先画成时间轴，再看 prefill 优先的做法（SGLang）怎样处理同样的请求，
# 以及几种策略给出的顺序。模型由我们来扮演：已知的 token 都算完了的请求，得到 token 7。

# %%
import matplotlib.pyplot as plt

from block_pool import BlockPool
from kv_memory import UncachedKVCacheManager
from prefill_first_scheduler import PrefillFirstScheduler
from request import Request
from scheduler import Scheduler
from scheduler_interface import StepOutput
from sglang_policies import policy_by_name

# The book's colours.
PROMPT = "#0072b2"
PREEMPTED = "#cc79a7"
BASELINE = "#999999"
INK = "#222222"
REQUEST_SHADES = ("#4095c5", "#80b8d8", "#b2d5e8", "#d9eaf3")  # of PROMPT

BLOCK_SIZE = 4


def make(num_blocks, kind=Scheduler, **options):
    memory = UncachedKVCacheManager(BlockPool(num_blocks + 1), BLOCK_SIZE)
    if kind is Scheduler:
        options.setdefault("watermark", 0.0)
    return kind(kv_memory=memory, **options)


def run_step(scheduler):
    output = scheduler.schedule()
    computed = (r for r in output.scheduled_requests if r.num_computed_tokens == r.num_tokens)
    scheduler.update_from_output(output, StepOutput({r.request_id: [7] for r in computed}))
    return output


def show(scheduler, output):
    print("computes", output.num_scheduled_tokens, "preempted", output.preempted_requests)
    for name, request in scheduler.running.items():
        print(f"    {request}  blocks {scheduler.kv_memory.get_block_ids(name)}")
    for request in scheduler.waiting:
        print(f"    waits: {request}")


# %% [markdown]
# ## Two requests, four blocks
#
# Both prompts have 7 tokens. Four blocks of 4 hold 16 positions, so both fit, and neither can grow.

# %%
scheduler = make(num_blocks=4)
for name in ("a", "b"):
    scheduler.add_request(Request.from_tokens(name, list(range(7)), max_new_tokens=6))


def step():
    show(scheduler, run_step(scheduler))


step()

# %% [markdown]
# Both requests are admitted; chapter 2 would have reserved 3 blocks for each, so `b` would have to
# wait. Take two more steps. The first writes position 7, and every block is full. The second needs
# a slot for position 8.

# %%
step()

# %%
step()

# %% [markdown]
# `b` was admitted last, so the scheduler preempted `b`. Look at its counters: `computed=0`, but its
# outputs are still there. `b` is admitted again when `a` has finished, and recomputes its prompt
# and outputs in one step.

# %%
while scheduler.has_unfinished_requests():
    step()

# %% [markdown]
# ## What it looks like
#
# A column is a step, a row is one of the twelve blocks, and a shade is a request, `a` the darkest;
# white blocks are free. `x d` marks the step in which `d` is preempted. All four requests start
# immediately. When no block is free, `d` loses its three (step 7) and then `c` its four (step 11),
# and the others grow into them. `c` and `d` return in step 14, when `a` and `b` have finished.


# %%
def draw(title, **options):
    """Run four requests on twelve blocks. Returns the number of steps."""
    scheduler = make(12, **options)
    for name in "abcd":
        scheduler.add_request(Request.from_tokens(name, [ord(name), *range(5)], 14))
    colors = dict(zip("abcd", REQUEST_SHADES, strict=True))
    _, axis = plt.subplots(figsize=(9, 2.6), layout="constrained")
    step = 0
    while scheduler.has_unfinished_requests():
        output = run_step(scheduler)
        for name in scheduler.running:
            for block_id in scheduler.kv_memory.get_block_ids(name):
                axis.bar(step, 1, 1, block_id - 1, align="edge", color=colors[name])
        for request in output.preempted_requests:
            axis.text(step, 12.2, f"x {request.request_id}", color=PREEMPTED)
        step += 1
    axis.set(xlim=(0, step), ylim=(0, 13), xlabel="step", ylabel="block", title=title)
    plt.show()
    return step


assert draw("filling: as many as fit, then preemption") == 21

# %% [markdown]
# The next picture has the same requests and axes, but every request reserves the blocks of its
# longest possible output, five each. No request is ever preempted, but `c` and `d` wait until `a`
# and `b` have finished, and the run takes 28 steps instead of 21.

# %%
assert draw("reserving: two at a time", max_preemptions=0) == 28

# %% [markdown]
# ## Prefill first, as in SGLang
#
# One new request arrives in every step. The plot shows how many tokens the first request has after
# each step. The two-phase scheduler (black) gives every running request a token, so the line rises
# by one in each step. The prefill-first rule without a bound (grey) computes prompts as long as
# there are any, and the first request never gets its second token. With at most three prefills in
# a row (blue), it gets one in every fourth step.


# %%
def tokens_of_the_first(kind, **options):
    scheduler = make(400, kind, max_num_seqs=100, max_num_batched_tokens=100, **options)
    first = Request.from_tokens("first", list(range(8)), max_new_tokens=40)
    scheduler.add_request(first)
    counts = []
    for i in range(24):
        scheduler.add_request(Request.from_tokens(f"new {i}", [i] * 8, max_new_tokens=40))
        run_step(scheduler)
        counts.append(first.num_output_tokens)
    return counts


figure, axis = plt.subplots(figsize=(6, 3.2), layout="constrained")
axis.plot(tokens_of_the_first(Scheduler), color=INK, label="two phases")
bounded = tokens_of_the_first(PrefillFirstScheduler, max_consecutive_prefills=3)
axis.plot(bounded, color=PROMPT, label="prefill first, at most 3 in a row")
unbounded = tokens_of_the_first(PrefillFirstScheduler, max_consecutive_prefills=None)
axis.plot(unbounded, color=BASELINE, label="prefill first, no bound")
axis.set(xlabel="step", ylabel="outputs of the first request", title="A new request in each step")
axis.legend(frameon=False)
plt.show()

# %% [markdown]
# ## Policies
#
# Three requests wait, and `max_num_seqs` is 1. Which one is first?

# %%
for policy in ("fcfs", "priority", "lof", "random"):
    scheduler = make(100, max_num_seqs=1, policy=policy_by_name(policy))
    for name, max_tokens, priority in (("early", 2, 2), ("long", 9, 1), ("urgent", 2, 0)):
        request = Request.from_tokens(name, [1, 2, 3], max_tokens, priority=priority)
        scheduler.add_request(request)
    print(f"{policy:10}", [request.request_id for request in scheduler.waiting])

# %% [markdown]
# ## Watch it run
#
# ![Film 4: memory runs out: preemption and return](figures/film.png)
#
# In step 6 all 15 blocks are taken and c needs one more. d, which was admitted last, is preempted:
# its 4 blocks are freed, its tokens are kept. It waits 7 steps. In step 13 it returns, recomputes
# the 16 lost tokens in one step, and continues where it was.
#
# The film itself takes seconds to make: `make watch ARGS="--film 4 --open"`
# in the root of the repository. Step through it with the arrow keys.
