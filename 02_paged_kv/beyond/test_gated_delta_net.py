"""The layer that keeps a state, beside that of `transformers`, whose float32 is float64 here; its
two forms beside each other; and what is kept at one place and gone on from."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

import gated_delta_net
from gated_delta_net import (
    DeltaNetSizes,
    GatedDeltaNet,
    LayerState,
    Written,
    by_head,
    chunked,
    recurrent,
    with_snapshots,
)

SIZES = DeltaNetSizes(num_key_heads=2, num_value_heads=6, key_dim=8, value_dim=4, kernel=4)
FIELDS = dict(
    vocab_size=50,
    hidden_size=24,
    intermediate_size=16,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    linear_num_key_heads=SIZES.num_key_heads,
    linear_num_value_heads=SIZES.num_value_heads,
    linear_key_head_dim=SIZES.key_dim,
    linear_value_head_dim=SIZES.value_dim,
    linear_conv_kernel_dim=SIZES.kernel,
)
ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
NEXT = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
NEXT |= dict(shared_expert_intermediate_size=8, experts_implementation="eager")  # in float64, too
KINDS = {
    "qwen3.5": lambda: qwen3_5.Qwen3_5TextModel(
        qwen3_5.Qwen3_5TextConfig(**FIELDS, rope_parameters=ROPE | {"mrope_section": [2, 1, 1]})
    ),
    "qwen3-next": lambda: qwen3_next.Qwen3NextModel(
        qwen3_next.Qwen3NextConfig(**FIELDS, **NEXT, rope_parameters=ROPE)
    ),
}


@pytest.fixture
def doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    """They compute in float32 whatever the dtype is. Here in float64, with no line changed."""

    class Double:
        float32, float = torch.float64, torch.float64

        def __getattr__(self, name: str):
            return getattr(torch, name)

    for module in (qwen3_5, qwen3_next):
        monkeypatch.setattr(module, "torch", Double())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_model(kind: str) -> torch.nn.Module:
    torch.manual_seed(5)
    model = KINDS[kind]().double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("A_log"):
                parameter.normal_(float("norm" in name), 0.3)
    return model


def layer_of(module: torch.nn.Module, dtype: torch.dtype = torch.float64) -> GatedDeltaNet:
    weights = {name: w.detach().to(dtype) for name, w in module.state_dict().items()}
    is_next = "in_proj_qkvz.weight" in weights
    return GatedDeltaNet(SIZES, by_head(weights, SIZES) if is_next else weights)


@cache
def a_module() -> torch.nn.Module:
    return random_model("qwen3.5").layers[0].linear_attn


def a_layer() -> GatedDeltaNet:
    return layer_of(a_module())


EMPTY = SIZES.empty_state(torch.float64)


def close(found, expected, within: float = 1e-10) -> None:
    if isinstance(found, LayerState):
        close(found.memory, expected.memory, within)
        found, expected = found.recent, expected.recent
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= within  # False for NaN


# -- beside transformers


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_each_layer_gives_what_transformers_gives_and_remembers_the_same(kind, doubles):
    """A prompt of more than one chunk, and then token by token."""
    model, cache = random_model(kind), DynamicCache(config=random_model(kind).config)
    seen: dict[int, list] = {}
    layers = {
        i: block.linear_attn
        for i, block in enumerate(model.layers)
        if getattr(block, "linear_attn", None) is not None
    }
    for i, module in layers.items():
        module.register_forward_hook(
            lambda _, args, kwargs, out, i=i: seen.setdefault(i, []).append(
                (kwargs["hidden_states"][0], out[0])
            ),
            with_kwargs=True,
        )
    ids = torch.arange(76)[None] * 7 % 50
    for piece in (ids[:, :70], *ids[:, 70:].split(1, dim=1)):
        model(input_ids=piece, past_key_values=cache, use_cache=True)
    assert sorted(seen) == [0, 1, 2]
    for i, calls in seen.items():
        layer, state = layer_of(layers[i]), EMPTY
        for hidden, expected in calls:
            before, (output, state) = state, layer.forward(hidden, state)
            assert expected.std() > 0.01
            close(output, expected)
            close(layer.forward(hidden, before, chunk=None)[0], expected)
        close(state.memory, cache.layers[i].recurrent_states[0][0])
        close(state.recent.T, cache.layers[i].conv_states[0][0][:, 1 - SIZES.kernel :])


@torch.inference_mode()
def test_in_bfloat16_it_rounds_where_transformers_rounds():
    module = random_model("qwen3.5").layers[0].linear_attn.to(torch.bfloat16)
    hidden = torch.randn(40, 24).bfloat16()
    layer = layer_of(module, torch.bfloat16)
    output, state = layer.forward(hidden, SIZES.empty_state(torch.bfloat16))
    expected = module(hidden[None])[0]
    assert state.memory.dtype == torch.float32 and state.recent.dtype == torch.bfloat16
    close(output.double(), expected.double(), 0.02 * expected.abs().max().item())


# -- two forms


def written(num_tokens: int, seed: int, decay: float = 1.0) -> Written:
    """`decay`: how much of it; 0 is none."""
    torch.manual_seed(seed)
    heads, wide = 3, torch.float64
    query, key = (torch.randn(num_tokens, heads, 5, dtype=wide) for _ in range(2))
    value, gate = torch.randn(num_tokens, heads, 4, dtype=wide), torch.randn(num_tokens, heads)
    key = key / key.norm(dim=-1, keepdim=True)
    return Written(query, key, value, -decay * gate.double().exp(), gate.double().sigmoid())


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 30), st.integers(0, 99), st.sampled_from([0.0, 0.01, 1.0, 300.0]))
def test_chunks_of_any_size_are_the_same_as_token_by_token(num_tokens, seed, decay):
    tokens = written(num_tokens, seed, decay)
    memory = torch.randn(3, 5, 4, dtype=torch.float64)
    expected, after = recurrent(memory, tokens)
    for size in range(1, num_tokens + 2):
        output, found = chunked(memory, tokens, size)
        close(found, after)
        close(output, expected)


# -- snapshots


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_from_a_state_everything_goes_on_as_from_the_start(data):
    """Cut anywhere, shorter than the convolution, too; at the borders of blocks, and there anew."""
    torch.manual_seed(data.draw(st.integers(0, 99)))
    layer, hidden = a_layer(), torch.randn(30, 24, dtype=torch.float64)
    expected, last = layer.forward(hidden, EMPTY)
    every = data.draw(st.integers(1, 12))
    outputs, kept = with_snapshots(layer, hidden, EMPTY, 0, every)
    close(outputs, expected)
    assert sorted(kept) == sorted({*range(0, 31, every), 30})
    position = data.draw(st.sampled_from(sorted(kept)[:-1]))
    more, again = with_snapshots(layer, hidden[position:], kept[position], position, every)
    close(more, expected[position:])
    for n in again:
        close(again[n], kept[n])
    close(kept[30], last)
    cut = data.draw(st.integers(1, 29))
    _, middle = layer.forward(hidden[:cut], EMPTY, chunk=3)
    output, end = layer.forward(hidden[cut:], middle, chunk=5)
    close(output, expected[cut:])
    close(end, last)


def test_what_is_kept_is_not_written_to():
    layer, hidden = a_layer(), torch.randn(20, 24, dtype=torch.float64)
    for chunk in (None, 7):
        _, state = layer.forward(hidden, EMPTY)
        copy = LayerState(state.memory.clone(), state.recent.clone())
        layer.forward(hidden, state, chunk)
        close(state, copy, 0.0)


# -- by hand


def check_the_example():
    """Decay, beta, key, value; the memory afterwards, row by row."""
    steps = [
        (1.0, 1.0, (1, 0), (2, 0), [[2, 0], [0, 0]]),
        (0.5, 0.5, (0, 1), (0, 4), [[1, 0], [0, 2]]),
        (0.5, 0.5, (1, 0), (0, 2), [[0.25, 1], [0, 1]]),
    ]

    def rows(column: int) -> torch.Tensor:
        return torch.tensor([step[column] for step in steps], dtype=torch.float64)[:, None]

    query = torch.tensor([1.0, 0.0], dtype=torch.float64).expand(3, 1, 2)
    tokens = Written(query, rows(2), rows(3), rows(0).log(), rows(1))
    memory = torch.zeros(1, 2, 2, dtype=torch.float64)
    for form in (recurrent, chunked):
        for n, (*_, expected) in enumerate(steps, 1):
            output, found = form(memory, tokens.piece(0, n))
            close(found[0], torch.tensor(expected, dtype=torch.float64), 1e-12)
            close(output[-1, 0], found[0, 0], 1e-12)  # a query of (1, 0) reads the first row


def test_the_example_of_the_page():
    check_the_example()


def check_a_cut():
    """In the middle of a block, and at its border."""
    layer, hidden = a_layer(), torch.randn(11, 24, dtype=torch.float64)
    expected, _ = layer.forward(hidden, EMPTY)
    _, kept = with_snapshots(layer, hidden, EMPTY, 0, every=4)
    for position in (4, 8):
        close(layer.forward(hidden[position:], kept[position])[0], expected[position:])


BUGS = {
    "the answer is from before the decay": (
        """memory = tokens.log_decay[i].exp()[:, None, None] * memory
        answer = torch.einsum("hkv,hk->hv", memory, key)""",
        """answer = torch.einsum("hkv,hk->hv", memory, key)
        memory = tokens.log_decay[i].exp()[:, None, None] * memory""",
        check_the_example,
    ),
    "beta is left out": ("delta = beta * (", "delta = (", check_the_example),
    "a token does not see itself": (".triu(1)", ".triu(0)", check_the_example),
    "a cut forgets the convolution": ("cat((recent, x))", "cat((0 * recent, x))", check_a_cut),
    "a snapshot is a token late": (
        "+ done] = state",
        "+ done] = layer.forward(hidden[done - 1 : done], state)[1]",
        check_a_cut,
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_what_is_planted_is_noticed(bug, monkeypatch):
    old, new, check = BUGS[bug]
    check()
    source = Path(gated_delta_net.__file__).read_text(encoding="utf-8")
    assert source.count(old) == 1
    planted = ModuleType("planted")
    monkeypatch.setitem(sys.modules, "planted", planted)  # its dataclasses look for it
    exec(source.replace(old, new), vars(planted))
    for name in ("recurrent", "chunked", "with_snapshots", "GatedDeltaNet", "Written"):
        monkeypatch.setitem(globals(), name, getattr(planted, name))
    with pytest.raises(AssertionError):
        check()


PUBLISHED = {  # layers with a state, of them value heads; layers with KV, of them heads
    "Qwen3-Next-80B-A3B": (36, 32, 12, 2),
    "Qwen3.5-27B": (48, 48, 16, 4),
    "Qwen3.6-35B-A3B": (30, 32, 10, 2),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_bytes_of_the_page(name):
    num_states, value_heads, num_kv, kv_heads = PUBLISHED[name]
    sizes = DeltaNetSizes(16, value_heads, 128, 128, 4)
    state = num_states * sizes.empty_state(torch.bfloat16).num_bytes
    per_token = num_kv * 2 * kv_heads * 256 * 2
    page = Path(__file__).with_name("STATES.md").read_text(encoding="utf-8")
    row = next(line for line in page.splitlines() if line.startswith(f"| {name} "))
    expected = [
        f"{state / 2**20:.1f} MiB",
        f"{per_token / 1024:.0f} KiB",
        f"{state // per_token:,}",
    ]
    assert [cell.strip() for cell in row.split("|")[-4:-1]] == expected
