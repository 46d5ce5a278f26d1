# %% [markdown]
# # Static and continuous batching, step by step
#
# This notebook runs the code of chapter 1. It defines only a few lines that print and draw. The
# model is a small random one: its text is noise, its steps are real.
#
# **中文提要**：六个请求，先按静态批跑，再按连续批跑，画出两者的时间轴：静态批要等最长的一个，
# 连续批一有请求结束就补上新的。然后打开一步的计划（plan），看 runner 收到的只是增量（delta）；
# 再看 padding 让一个批多算了什么。最后是引擎自己录下的影片。模型是随机的小模型，文字没有意义，
# 步骤是真的。

# %%
# ruff: noqa: E402
import warnings

warnings.filterwarnings("ignore", message="IProgress not found")  # from tqdm, without ipywidgets
# transformers 5.24 has a new name for an argument; older versions know only this one.
warnings.filterwarnings("ignore", message="`past_key_values` is deprecated")

import matplotlib.pyplot as plt
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from engine_core import EngineCore
from fcfs_scheduler import FCFSScheduler
from hf_model_runner import HFModelRunner
from input_batch import RunnerState, prepare_inputs_from_scheduler_output
from request import Request
from scheduler_interface import StepOutput
from static_batching import generate_static
from step_record import make_record

# The book's colours.
PROMPT = "#0072b2"
DECODE = "#56b4e9"
WASTE = "#f0b54a"
PAPER = "#ffffff"

torch.manual_seed(0)
torch.set_num_threads(1)
config = Qwen3Config(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    initializer_range=0.5,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
model = Qwen3ForCausalLM(config).to(torch.float64).eval()

# %% [markdown]
# ## Six requests
#
# Their outputs have very different lengths. Here only its length stops a request.

# %%
output_lens = {"a": 3, "b": 12, "c": 2, "d": 7, "e": 4, "f": 5}


def make_requests():
    return [
        Request.from_tokens(name, [10 + i, 20 + i, 30 + i], length, arrival_time=i)
        for i, (name, length) in enumerate(output_lens.items())
    ]


print(f"{len(output_lens)} requests, {sum(output_lens.values())} tokens to generate")

# %% [markdown]
# ## A static batch
#
# The batch has three slots. It steps until its longest request has finished. `P` is a prefill, `u`
# a token that a user gets, `.` a slot that is computed for no request.

# %%
report = generate_static(model, make_requests(), batch_size=3)
for batch in report.batches:
    for name, row in zip(batch.req_ids, batch.timeline, strict=True):
        print(f"step {batch.start_step:2}  {name}  {row}")
print(f"{report.slot_steps_used} of {report.slot_steps_spent} slot-steps used")

# %% [markdown]
# ## Continuous batching
#
# Now run the same requests with the same model, but let the scheduler decide before every step.
# `make_record` makes a record of each step. Watch the column "joins": a request joins in the step
# after another one left.

# %%
records = []
engine = EngineCore(FCFSScheduler(max_num_seqs=3), HFModelRunner(model))
requests = make_requests()
for request in requests:
    engine.add_request(request)
while engine.has_unfinished_requests():
    engine.step()
    records.append(make_record(engine, len(records)))

print("step  tokens computed       joins    leaves   waiting")
for record in records:
    tokens = ", ".join(f"{name} {count}" for name, count in record.num_scheduled_tokens.items())
    joins, leaves = " ".join(record.admitted), " ".join(record.finished)
    print(f"{record.step:4}  {tokens:20}  {joins:7}  {leaves:7}  {record.num_waiting}")

# %%
used = sum(output_lens.values())
print(f"{used} of {3 * len(records)} slot-steps used in {len(records)} steps")

# %% [markdown]
# All tokens are the same. You cannot see batching in the output.

# %%
assert {request.request_id: request.output_token_ids for request in requests} == report.token_ids

# %% [markdown]
# ## A timeline of both
#
# A row is a slot, a column is a step: dark blue is a prefill, light blue a decode, and orange a
# slot that is computed for no request. The static batches waste 24 slot-steps, because each waits
# for its longest request. The continuous run has no orange: `d` joins in step 2, as soon as `c`
# has left slot 2, and everything ends in step 11 instead of 18. A request keeps the slot that it
# was admitted to. The white slots at the end are not computed, because no request waits any
# longer.

# %%
static = ["", "", ""]
for batch in report.batches:
    for slot, row in enumerate(batch.timeline):
        static[slot] += row

continuous = ["", "", ""]
slots = [None] * 3
for record in records:
    for name in record.admitted:
        slots[slots.index(None)] = name
    for slot, name in enumerate(slots):
        if name is not None:
            continuous[slot] += "P" if name in record.admitted else "u"
    slots = [None if name in record.finished else name for name in slots]

colors = {"P": PROMPT, "u": DECODE, ".": WASTE}
figure, axes = plt.subplots(2, 1, figsize=(7, 3.2), sharex=True, layout="constrained")
for axis, rows, title in zip(axes, (static, continuous), ("static", "continuous")):
    for slot, row in enumerate(rows):
        widths = [1] * len(row)
        axis.barh(
            slot, widths, left=range(len(row)), color=[*map(colors.get, row)], edgecolor=PAPER
        )
    axis.set(title=f"{title} (dark: prefill, light: decode, orange: wasted)", ylabel="slot")
    axis.invert_yaxis()
_ = axes[1].set_xlabel("step")
# %% [markdown]
# ## What a plan contains
#
# This is the worked example of the chapter. Two requests are running: `c` has prompt `[9, 10]` and
# two outputs, `d` has prompt `[13, 14, 15, 16]` and one. Two wait: `a` with `[1..5]` and `b` with
# `[6, 7, 8]`. There is only the scheduler here, and we play the model: we pass in the sampled
# tokens.

# %%
scheduler = FCFSScheduler(max_num_seqs=4, max_num_batched_tokens=20)
state = RunnerState()  # the runner's copies of the requests
for new, sampled in [
    (Request.from_tokens("c", [9, 10]), {"c": [11]}),
    (Request.from_tokens("d", [13, 14, 15, 16]), {"d": [17], "c": [12]}),
]:
    scheduler.add_request(new)
    plan = scheduler.schedule()
    state.apply(plan)
    scheduler.update_from_output(plan, StepOutput(sampled))
for request in scheduler.running.values():
    print(request, request.all_token_ids)

# %%
scheduler.add_request(Request.from_tokens("a", [1, 2, 3, 4, 5]))
scheduler.add_request(Request.from_tokens("b", [6, 7, 8]))
plan = scheduler.schedule()
print(*plan.scheduled_new_reqs, sep="\n")
print(plan.scheduled_cached_reqs)
print(plan.num_scheduled_tokens)

# %% [markdown]
# A prompt is sent once. A running request costs one token id. From the plans alone the runner knows
# every token, and lays out the padded batch. The token that `c` feeds back is its fourth, so its
# position is 3.

# %%
batch = prepare_inputs_from_scheduler_output(plan, state)
token_ids, attention_mask, positions = batch.to_tensors("cpu")
print(batch)
print(token_ids)
print(positions)

# %% [markdown]
# ## Watch it run
#
# ![Film 1: a static batch, and a continuous one](figures/film.png)
#
# 6 requests, 3 slots (max_num_seqs). c ends in step 5. In the static batch its slot stays empty
# until b, the longest, has ended too, so d starts in step 14. In the continuous batch d starts in
# step 6, and everything takes 19 steps instead of 24. The static run is this engine with one more
# rule: no request joins a running batch (“held back” in the picture). Rows of finished requests are
# not computed here; a padded batch computes them too.
#
# The film itself takes seconds to make: `make watch ARGS="--film 1 --open"`
# in the root of the repository. Step through it with the arrow keys.
