# %% [markdown]
# # A long prompt, one chunk at a time
#
# This notebook uses the code of chapter 6. It defines only a few lines that print.
#
# **中文提要**：同样的请求，两种分块策略各跑一遍，看谁在等谁；
# 最后在引擎里用三种大小的块算同一个 prompt，得到的文字相同。

# %%
import warnings

import torch

from chunk_policy import ChunkedPrefill
from common.llm import LLM, SamplingParams
from request import Request
from scheduler import Scheduler
from scheduler_interface import StepOutput
from unchunked import Unchunked

torch.set_num_threads(1)
warnings.filterwarnings("ignore", message="IProgress")  # no progress bars are wanted here

# %% [markdown]
# ## The same requests under two policies
#
# Two short requests decode; in the third step a prompt of 40 tokens arrives. A step has a budget of
# 48 tokens. Each row is a step, with the number of tokens computed for each request. The scheduler
# has no notion of phases: a request gets its uncomputed tokens, or fewer.


# %%
def timeline(policy):
    scheduler = Scheduler(max_num_batched_tokens=48, chunk_policy=policy)
    for name in "ab":
        scheduler.add_request(Request.from_tokens(name, [1, 2, 3], max_new_tokens=9))
    for step in range(9):
        if step == 2:
            long = Request.from_tokens("long", list(range(40)), max_new_tokens=2)
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
