# %% [markdown]
# # Accept, or sample from the residual
#
# Everything here is imported from the chapter: eight tokens, a target distribution p, a draft
# distribution q that differs from it, and the chapter's own verification function.
#
# **中文提要**：八个 token，目标分布 p，草稿分布 q。草稿 token 以 min(1, p/q) 的概率接受，
# 被拒时从残差里重抽，抽出来的分布恰好是 p：先算，再画，再数。然后是另一条规则（先抽目标 token，
# 再和草稿 token 比较），以及怎样从文中查找（n-gram）。

# %%
import matplotlib.pyplot as plt
import torch

from input_batch import RunnerRequest
from proposers import NgramProposer, ProposerInput
from rejection_sampler import rejection_sample, rejection_sampling_batched
from request import SamplingParams

# The book's colours.
DRAFT = "#5b4b9a"
ACCEPTED = "#8fbf3f"
REJECTED = "#d55e00"
INK = "#222222"

torch.manual_seed(0)
p = torch.tensor([0.05, 0.30, 0.10, 0.25, 0.02, 0.08, 0.15, 0.05], dtype=torch.float64)
q = torch.tensor([0.20, 0.20, 0.02, 0.30, 0.10, 0.03, 0.05, 0.10], dtype=torch.float64)
NUM_REQUESTS = 100_000

# %% [markdown]
# Take one hundred thousand requests, each with one draft token drawn from q. A request has two rows
# of logits: one for the position of its draft token, one for the bonus token after it.

# %%
drafts = torch.multinomial(q, NUM_REQUESTS, replacement=True)


def uniform(n):
    return torch.rand(n, dtype=torch.float64)


verified = rejection_sample(
    target_probs=p.expand(2 * NUM_REQUESTS, -1),
    draft_token_ids=drafts,
    draft_probs=q.expand(NUM_REQUESTS, -1),
    cu_num_logits=torch.arange(0, 2 * NUM_REQUESTS + 1, 2),
    max_num_drafts=1,
    accept_u=uniform(NUM_REQUESTS),
    sample_u=uniform(2 * NUM_REQUESTS),
)
first = verified.token_ids[:, 0]
is_accepted = verified.num_sampled == 2
print(
    f"accepted {is_accepted.double().mean():.3f}, sum of min(p, q) {torch.minimum(p, q).sum():.3f}"
)

# %% [markdown]
# ## The picture
#
# A bar is the share of the outputs that are this token. Green shows accepted draft tokens, which
# add up to min(p, q); orange shows tokens drawn from the residual after a rejection. A cross is q,
# a black line is p. Where the cross is above the line (tokens 0, 3, 4, 7) the draft model proposes
# the token too often, and green stops at p. Elsewhere every such draft token is accepted, and
# orange fills the gap. Together they equal p exactly, and nothing of q is left.

# %%
accepted = torch.bincount(first[is_accepted], minlength=8) / NUM_REQUESTS
recovered = torch.bincount(first[~is_accepted], minlength=8) / NUM_REQUESTS

figure, axis = plt.subplots(figsize=(7, 3.6), layout="constrained")
tokens = range(8)
axis.bar(tokens, accepted, color=ACCEPTED, label="draft token accepted")
axis.bar(tokens, recovered, bottom=accepted, color=REJECTED, label="drawn from the residual")
axis.plot(tokens, p, "_", color=INK, markersize=28, label="p, the target")
axis.plot(tokens, q, "x", color=DRAFT, label="q, the draft")
axis.set(xlabel="token", xticks=tokens, ylabel="share of the outputs")
axis.legend(frameon=False)
plt.show()

# %%
print("p        ", [round(x, 3) for x in p.tolist()])
print("came out ", [round(x, 3) for x in (accepted + recovered).tolist()])
assert (accepted + recovered - p).abs().max() < 0.01

# %% [markdown]
# ## The other rule
#
# Matching draws the target's token as plain decoding would, and accepts the draft token if both are
# equal. This is exact as well, but independent draws rarely agree.

# %%
sampled = torch.multinomial(p, 2 * NUM_REQUESTS, replacement=True)
rows = torch.arange(0, 2 * NUM_REQUESTS + 1, 2)
tokens, num_sampled = rejection_sampling_batched(sampled, drafts, rows, 1)
came_out = torch.bincount(tokens[:, 0], minlength=8) / NUM_REQUESTS
print("came out ", [round(x, 3) for x in came_out.tolist()])
print(f"accepted {(num_sampled == 2).double().mean():.3f}, sum of p q {(p * q).sum():.3f}")
assert (came_out - p).abs().max() < 0.01

# %% [markdown]
# ## Looking up n-grams
#
# There is no model here. The proposer looks for an earlier occurrence of the last tokens in the
# text, and proposes the tokens that followed it.

# %%
text = "the cat sat on the mat and the dog sat on"
words = text.split()
ids = {word: i for i, word in enumerate(dict.fromkeys(words))}
request = RunnerRequest("a", SamplingParams(), [ids[word] for word in words], [])
inputs = [ProposerInput(request, start=0, num_computed_tokens=len(words) - 1)]
drafts = NgramProposer(num_spec_tokens=3, max_ngram=3, min_ngram=1).propose(inputs, [3])
names = list(ids)
print(text, "->", " ".join(names[i] for i in drafts["a"]))
assert [names[i] for i in drafts["a"]] == ["the", "mat", "and"]

# %% [markdown]
# ## Watch it run
#
# ![Film 5: draft tokens, accepted and rejected](figures/film.png)
#
# The same requests without draft tokens and with them give the same tokens. In step 5 all draft
# tokens of a are accepted, and it gains 3 tokens. All 3 of c are rejected, so it gains one token,
# as without them. 16 steps do the work of 22.
#
# The film itself takes seconds to make: `make watch ARGS="--film 5 --open"`
# in the root of the repository. Step through it with the arrow keys.
