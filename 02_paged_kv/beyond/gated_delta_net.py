"""A layer that remembers by a state: Gated DeltaNet, in plain PyTorch. No engine uses it yet.

Attention keeps a key and a value of every token. Here each head keeps one matrix S, [key, value],
however many tokens there were. A token with key k, value v and query q does this to it:

    S <- decay * S                      forget a little of everything; 0 < decay <= 1
    S <- S + k (beta (v - S'k))'        what k leads to comes nearer to v; 0 < beta < 1
    o  = S'q                            read

S'k is what the state answers to k before the update: only the difference is written (the delta
rule), so that a key which comes again corrects its value instead of adding to it.

**Chunks.** Token by token is little work at a time. With G_i the sum of log decay up to token i of
a chunk, what token i writes is

    d_i = beta_i (v_i - exp(G_i) S'k_i - sum over j < i of exp(G_i - G_j) (k_j . k_i) d_j)

a triangular system for all d of the chunk: (I + A) D = beta V - (beta exp(G) K) S. Its two right
sides need no state, so U and W with D = U - W S can be had for all chunks before the first state is
known (the WY representation).

Before that, q, k and v pass a convolution over the last `kernel` tokens, whose inputs are the other
half of what a layer remembers. After it each head is normed, and gated.

Invariants: nothing is overwritten, so a `LayerState` that is kept is a snapshot; from the state
after n tokens everything goes on as from the start, wherever n lies. States are at least float32.

Yang, Kautz, Hatamizadeh (arXiv 2412.06464). The order of operations is that of Qwen3-Next and
Qwen3.5 in `transformers`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK = 64


@dataclass(frozen=True, slots=True)
class LayerState:
    """What a layer remembers of all tokens so far."""

    memory: Tensor  # [num_value_heads, key_dim, value_dim]: S of each head
    recent: Tensor  # [kernel - 1, channels]: inputs of the convolution, the last one at the end

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.memory, self.recent))


@dataclass(frozen=True, slots=True)
class Written:
    """What a piece of the sequence does to the memory; tokens first, heads second, float32 at
    least. Queries and keys have length 1, queries divided by the root of their size."""

    query: Tensor  # [num_tokens, num_heads, key_dim]
    key: Tensor
    value: Tensor  # [num_tokens, num_heads, value_dim]
    log_decay: Tensor  # [num_tokens, num_heads], <= 0
    beta: Tensor  # [num_tokens, num_heads]

    def piece(self, start: int, stop: int) -> Written:
        parts = self.query, self.key, self.value, self.log_decay, self.beta
        return Written(*(part[start:stop] for part in parts))


# -- the rule, in two forms


def recurrent(memory: Tensor, tokens: Written) -> tuple[Tensor, Tensor]:
    """One token at a time: the specification. Outputs [num_tokens, num_heads, value_dim], and the
    memory after the last token."""
    outputs = torch.empty_like(tokens.value)
    for i in range(len(outputs)):
        key, beta = tokens.key[i], tokens.beta[i][:, None]
        memory = tokens.log_decay[i].exp()[:, None, None] * memory
        answer = torch.einsum("hkv,hk->hv", memory, key)
        delta = beta * (tokens.value[i] - answer)
        memory = memory + key[:, :, None] * delta[:, None, :]
        outputs[i] = torch.einsum("hkv,hk->hv", memory, tokens.query[i])
    return outputs, memory


def chunked(memory: Tensor, tokens: Written, size: int = CHUNK) -> tuple[Tensor, Tensor]:
    """The same in products of matrices, `size` tokens at a time."""
    outputs = []
    for start in range(0, len(tokens.value), size):
        output, memory = one_chunk(memory, tokens.piece(start, start + size))
        outputs.append(output)
    return torch.cat(outputs), memory


def one_chunk(memory: Tensor, tokens: Written) -> tuple[Tensor, Tensor]:
    query, key, value = (t.transpose(0, 1) for t in (tokens.query, tokens.key, tokens.value))
    beta = tokens.beta.T[:, :, None]  # heads first: [num_heads, num_tokens, 1]
    total = tokens.log_decay.cumsum(0).T  # G, [num_heads, num_tokens]
    num_tokens, since_start = total.shape[1], total.exp()[:, :, None]
    # exp(G_i - G_j) for j <= i; above the diagonal it could overflow, and nobody reads it.
    behind = torch.ones(num_tokens, num_tokens, device=total.device).triu(1).bool()
    between = (total[:, :, None] - total[:, None, :]).masked_fill(behind, -torch.inf).exp()

    system = beta * (key @ key.mT) * between  # its diagonal counts as 1
    right = torch.cat((beta * value, beta * since_start * key), dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    u, w = solved.split((value.shape[-1], key.shape[-1]), dim=-1)

    written = u - w @ memory
    output = since_start * (query @ memory) + ((query @ key.mT) * between) @ written
    until_end = (total[:, -1:] - total).exp()[:, :, None]
    memory = since_start[:, -1:] * memory + (until_end * key).mT @ written
    return output.transpose(0, 1), memory


# -- what stands around it


def short_convolution(x: Tensor, recent: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Of each channel of `x` [num_tokens, channels] its last `kernel` values, weighted by `weight`
    [channels, kernel]; then silu. And what the next tokens need."""
    seen = torch.cat((recent, x))
    mixed = F.conv1d(seen.T[None], weight[:, None], groups=len(weight))[0].T
    return F.silu(mixed), seen[len(x) :]


def unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of each head, and only then the gate."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight * normed.to(x.dtype) * F.silu(gate.to(wide.dtype))).to(x.dtype)


@dataclass(frozen=True, slots=True)
class DeltaNetSizes:
    num_key_heads: int
    num_value_heads: int  # a multiple
    key_dim: int
    value_dim: int
    kernel: int  # of the convolution
    eps: float = 1e-6

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values of all heads."""
        values = self.num_value_heads * self.value_dim
        return 2 * self.num_key_heads * self.key_dim + values

    def empty_state(self, dtype: torch.dtype) -> LayerState:
        """Before the first token."""
        wide = torch.promote_types(dtype, torch.float32)
        memory = torch.zeros(self.num_value_heads, self.key_dim, self.value_dim, dtype=wide)
        return LayerState(memory, torch.zeros(self.kernel - 1, self.channels, dtype=dtype))


@dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    """`weights` by Qwen3.5's names, below `linear_attn`."""

    sizes: DeltaNetSizes
    weights: Mapping[str, Tensor]

    def forward(
        self, hidden: Tensor, state: LayerState, chunk: int | None = CHUNK
    ) -> tuple[Tensor, LayerState]:
        """`hidden` [num_tokens, hidden_size], normed, are the next tokens after `state`. Gives what
        is added to the residual stream, and the state after them. `chunk` None: token by token."""
        weights, sizes, num_tokens = self.weights, self.sizes, len(hidden)
        qkv = hidden @ weights["in_proj_qkv.weight"].T
        mixed, recent = short_convolution(qkv, state.recent, weights["conv1d.weight"][:, 0])
        tokens = self.written(hidden, mixed)
        if chunk is None:
            output, memory = recurrent(state.memory, tokens)
        else:
            output, memory = chunked(state.memory, tokens, chunk)
        gate = (hidden @ weights["in_proj_z.weight"].T).view(num_tokens, -1, sizes.value_dim)
        normed = gated_norm(output.to(hidden.dtype), gate, weights["norm.weight"], sizes.eps)
        added = normed.reshape(num_tokens, -1) @ weights["out_proj.weight"].T
        return added, LayerState(memory, recent)

    def written(self, hidden: Tensor, mixed: Tensor) -> Written:
        weights, sizes = self.weights, self.sizes
        wide = torch.promote_types(hidden.dtype, torch.float32)
        of_keys = sizes.num_key_heads * sizes.key_dim
        parts = mixed.to(wide).split((of_keys, of_keys, sizes.channels - 2 * of_keys), dim=-1)
        query, key = (part.view(len(hidden), -1, sizes.key_dim) for part in parts[:2])
        sharing = sizes.num_value_heads // sizes.num_key_heads  # value heads of one key head
        query, key = (unit(x).repeat_interleave(sharing, dim=1) for x in (query, key))
        step = (hidden @ weights["in_proj_a.weight"].T).to(wide) + weights["dt_bias"]
        return Written(
            query * sizes.key_dim**-0.5,
            key,
            parts[2].view(len(hidden), -1, sizes.value_dim),
            -weights["A_log"].to(wide).exp() * F.softplus(step),
            (hidden @ weights["in_proj_b.weight"].T).sigmoid().to(wide),
        )


def with_snapshots(
    layer: GatedDeltaNet, hidden: Tensor, state: LayerState, num_before: int, every: int
) -> tuple[Tensor, dict[int, LayerState]]:
    """`forward` for tokens `num_before`, `num_before + 1`, ...; and the states after each whole
    block of `every` tokens, and after the last one, by the number of tokens that they remember."""
    outputs, kept, done = [], {num_before: state}, 0
    while done < len(hidden):
        until = min(len(hidden), done + every - (num_before + done) % every)
        output, state = layer.forward(hidden[done:until], state)
        outputs.append(output)
        done = until
        kept[num_before + done] = state
    return torch.cat(outputs), kept


def by_head(weights: Mapping[str, Tensor], sizes: DeltaNetSizes) -> dict[str, Tensor]:
    """Qwen3-Next's weights by Qwen3.5's names: it stores q, k, v and z of a key head together, and
    so b and a."""
    heads, sharing = sizes.num_key_heads, sizes.num_value_heads // sizes.num_key_heads
    values = sharing * sizes.value_dim
    qkvz = weights["in_proj_qkvz.weight"].unflatten(0, (heads, -1))
    parts = qkvz.split((sizes.key_dim, sizes.key_dim, values, values), dim=1)
    query, key, value, gate = (part.flatten(0, 1) for part in parts)
    beta, step = weights["in_proj_ba.weight"].unflatten(0, (heads, -1)).split(sharing, dim=1)
    return {name: w for name, w in weights.items() if not name.startswith("in_proj")} | {
        "in_proj_qkv.weight": torch.cat((query, key, value)),
        "in_proj_z.weight": gate,
        "in_proj_b.weight": beta.flatten(0, 1),
        "in_proj_a.weight": step.flatten(0, 1),
    }
