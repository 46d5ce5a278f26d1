"""Chapter 6 in 33 lines: a prompt in chunks.

Run it: `python 06_chunked_prefill/small_chunks.py`.

See 06_chunked_prefill/README.md#the-idea-in-one-small-file"""

import math

import torch

from mixed_attention import mixed_attention
from paged_attention import AttentionMetadata

BUDGET = 5  # tokens per step: one for each decoding request, the rest for the prompt
PROMPT_LEN, NUM_DECODES = 10, 1
CHUNK = BUDGET - NUM_DECODES
torch.manual_seed(6)
queries, keys, values = torch.randn(3, PROMPT_LEN, dtype=torch.float64)  # one head of size 1


def attend(query, span):
    """Attention to some keys: its output, and the logarithm of the sum of exp(score)."""
    weights = [math.exp(query * keys[i]) for i in span]
    output = sum(w * values[i] for w, i in zip(weights, span)) / sum(weights)
    return output, math.log(sum(weights))


def merge(left, right):
    """Attention to the keys of both sides, each with the weight exp(its log-sum-exp)."""
    a, b = math.exp(left[1]), math.exp(right[1])
    return (a * left[0] + b * right[0]) / (a + b), math.log(a + b)


outputs = []
num_computed, step = 0, 1
while num_computed < PROMPT_LEN:
    num_tokens = min(PROMPT_LEN - num_computed, CHUNK)
    for position in range(num_computed, num_computed + num_tokens):
        result = attend(queries[position], range(num_computed, position + 1))  # its own chunk
        for start in range(0, num_computed, CHUNK):  # earlier chunks
            earlier = range(start, start + CHUNK)
            result = merge(result, attend(queries[position], earlier))
        outputs.append(result[0])
    has_logits = num_computed + num_tokens == PROMPT_LEN
    print(f"step {step}: positions {num_computed}..{num_computed + num_tokens - 1}", end="")
    print(f" and {NUM_DECODES} decode, {'a token comes out' if has_logits else 'no logits yet'}")
    num_computed += num_tokens
    step += 1

# Compare with the chapter's function: blocks of 4 in a table, the whole prompt in one step.
key_cache, value_cache = (torch.zeros(4, 4, 1, 1, dtype=torch.float64) for _ in range(2))
for cache, new in ((key_cache, keys), (value_cache, values)):
    cache.view(-1)[4 : 4 + PROMPT_LEN] = new
metadata = AttentionMetadata(
    query_start_loc=torch.tensor([0, PROMPT_LEN]),
    seq_lens=torch.tensor([PROMPT_LEN]),
    block_tables=torch.tensor([[1, 2, 3]]),
    slot_mapping=torch.arange(4, 4 + PROMPT_LEN),
    max_query_len=PROMPT_LEN,
    max_seq_len=PROMPT_LEN,
)
real = mixed_attention(queries.view(-1, 1, 1), key_cache, value_cache, metadata, scale=1.0)
torch.testing.assert_close(real.flatten(), torch.stack(outputs))
print("mixed_attention.py says the same")
