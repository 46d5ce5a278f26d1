# %% [markdown]
# # A long prompt, one chunk at a time
#
# This notebook uses the code of chapter 6. It defines only a few lines that print and draw.
#
# **中文提要**：同样的请求，两种分块策略各跑一遍，看谁在等谁；每个 token 的代价；
# 按时间定大小的块；一次注意力调用怎样同时算解码和块；
# 最后在引擎里用三种大小的块算同一个 prompt，得到的文字相同。

# %%
import warnings

import matplotlib.pyplot as plt
import torch

from adaptive_chunks import AdaptiveChunks
from chunk_policy import ChunkedPrefill
from common.llm import LLM, SamplingParams
from mixed_attention import mixed_attention
from paged_attention import AttentionMetadata, paged_attention
from request import Request
from scheduler import Scheduler
from scheduler_interface import StepOutput
from step_cost import ModelShape, count_bytes_and_flops, count_work
from unchunked import Unchunked

# The book's colours.
PROMPT = "#0072b2"
INK = "#222222"

torch.set_num_threads(1)
warnings.filterwarnings("ignore", message="IProgress")  # no progress bars are wanted here

# %% [markdown]
# ## The same requests under two policies
#
# Two short requests decode; in the third step a prompt of 40 tokens arrives. A step has a budget of
# 48 tokens. Each row is a step, with the number of tokens computed for each request. The scheduler
# has no notion of phases: a request gets its uncomputed tokens, or fewer.


# %%
def timeline(policy, prompt_len=40, **options):
    scheduler = Scheduler(max_num_batched_tokens=48, chunk_policy=policy, **options)
    for name in "ab":
        scheduler.add_request(Request.from_tokens(name, [1, 2, 3], max_new_tokens=9))
    for step in range(9):
        if step == 2:
            long = Request.from_tokens("long", list(range(prompt_len)), max_new_tokens=2)
            scheduler.add_request(long)
        output = scheduler.schedule()
        row = output.num_scheduled_tokens
        print("  ".join(f"{name}: {row[name]:2d}" for name in ("a", "b", "long") if name in row))
        at_end = [r for r in output.scheduled_requests if r.num_computed_tokens == r.num_tokens]
        scheduler.update_from_output(output, StepOutput({r.request_id: [7] for r in at_end}))


print("whole prompts")
timeline(Unchunked())
print("at most 16 tokens of a prompt in a step")
timeline(ChunkedPrefill(16))

# %% [markdown]
# ## What a token costs
#
# The table shows arithmetic per byte moved, for a model of 0.6 billion weights. A decode moves all
# the weights for one token; a chunk uses the same weights for 256 tokens. An H200 (989 TFLOP/s in
# bfloat16, 4.8 TB/s, by its data sheet) does about 200 FLOPs in the time in which it moves a byte.
# Below that the memory is the limit, above it the arithmetic.

# %%
shape = ModelShape(600_000_000, num_layers=28, num_heads=16, num_kv_heads=8, head_dim=128)
for name, starts, lens in (
    ("one decode", [1000], [1]),
    ("32 decodes", [1000] * 32, [1] * 32),
    ("a chunk of 256", [1000], [256]),
    ("both in one step", [1000] * 33, [1] * 32 + [256]),
    ("a prompt of 4,096", [0], [4096]),
):
    work = count_bytes_and_flops(count_work(starts, lens), shape)
    print(
        f"{name:18s} {work.flops / 1e9:9,.0f} GFLOP {work.bytes_moved / 1e9:6.2f} GB "
        f"{work.flops_per_byte:8,.0f} FLOP a byte"
    )

# %% [markdown]
# ## Chunks that fit into a time limit
#
# `AdaptiveChunks` steers by the clock. Here the clock is a formula, so the picture is the same
# everywhere: 2 ms per step, 0.05 ms per token, 0.2 microseconds per query-key pair. The target is
# 20 ms, the black line on the right. A bar on the left is the size of a step's chunk, a dot on the
# right is the step's time. The first chunks double in size until a step takes 20 ms. Then they
# shrink from 158 tokens to about 20, because each token attends to a longer history, and the time
# stays just below the line.

# %%
policy = AdaptiveChunks(target_step_ms=20.0)
start = 0
sizes = []
times = []
request = Request.from_tokens("long", [1] * 4000, max_new_tokens=1)
while start < 4000:
    policy.begin_step(running=[], num_uncomputed_tokens=lambda request: 0)
    size = policy.num_tokens_to_schedule(request, 4000 - start, 4096, 4096)
    work = count_work([start], [size])
    step_ms = 2.0 + 0.05 * work.num_tokens + 0.0002 * work.num_chunk_pairs
    policy.observe_step([start], [size], step_ms)
    start = start + size
    sizes = [*sizes, size]
    times = [*times, step_ms]

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
left.bar(range(len(sizes)), sizes, color=PROMPT)
left.set(xlabel="step", ylabel="tokens of the prompt")
right.plot(times, ".-", color=PROMPT)
right.axhline(20, color=INK, linewidth=0.8)
right.set(xlabel="step", ylabel="ms", ylim=0)
plt.show()

# %% [markdown]
# ## One attention call for all of them
#
# Two decodes and a chunk of five tokens are compared with chapter 2's specification, in float64.

# %%
torch.manual_seed(0)
keys, values = torch.randn(2, 12, 4, 2, 8, dtype=torch.float64)
query = torch.randn(7, 4, 8, dtype=torch.float64)
metadata = AttentionMetadata(
    query_start_loc=torch.tensor([0, 1, 2, 7]),
    seq_lens=torch.tensor([9, 14, 11]),
    block_tables=torch.tensor([[3, 1, 7, 0], [2, 9, 4, 11], [8, 5, 10, 0]]),
    slot_mapping=torch.full((7,), -1),
    max_query_len=5,
    max_seq_len=14,
)
specified = paged_attention(query, keys, values, metadata, 8**-0.5)
mixed = mixed_attention(query, keys, values, metadata, 8**-0.5)
print("largest difference is below 1e-12:", (specified - mixed).abs().max().item() < 1e-12)

# %% [markdown]
# ## In the engine
#
# The bundled model computes a prompt of 192 tokens in chunks of three sizes: the text is the same.

# %%
prompt = "\n".join(f"def area_{i}(width, height):\n    return width * height\n" for i in range(12))
params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
texts = set()
for size in (1000, 64, 17):
    llm = LLM(chunked_prefill=size, num_blocks=200)
    steps = []
    llm.engine.on_step = lambda record, steps=steps: steps.append(record)
    output = llm.generate(prompt, params, use_tqdm=False)[0]
    texts.add(output.outputs[0].text)
    lens = [sum(step.num_scheduled_tokens.values()) for step in steps]
    print(
        f"chunks of {size:4d}: {[n for n in lens if n > 1]}, then {lens.count(1)} tokens one by one"
    )
print("one text:", len(texts) == 1)

# %% [markdown]
# ## Watch it run
#
# ![Film 6: a long prompt, whole and in chunks](figures/film.png)
#
# c arrives with 152 tokens in step 5. Whole, they make one step of 154 tokens, and a and b wait for
# all of it. In chunks of 32 they make 5 steps of at most 39 tokens, and a and b get a token in
# each. In return, c gets its first token in step 9 instead of 5.
#
# The film itself takes seconds to make: `make watch ARGS="--film 6 --open"`
# in the root of the repository. Step through it with the arrow keys.
