"""The kernels against the PyTorch version, bit for bit: on a GPU if there is one, else in Triton's
interpreter (`conftest.py` switches it on). The cases of the PyTorch version run over them too."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from common.assembly import assembly
from common.engine import EngineConfig, LLMEngine
from common.models.loader import load_model
from common.tests.engine_oracle import (
    make_oracle,
    paged_runner,
    random_prompts,
    save_random_model,
    serve,
)
from exact_law import LAST
from rejection_sampler import VerifiedTokens, rejection_sample, rejection_sampling_batched
from rejection_sampler_triton import (
    TILE,
    rejection_sample_triton,
    rejection_sampling_batched_triton,
)
from request import SamplingParams
from test_rejection_sampler import (  # noqa: F401  the tests get this file's `rules`
    F32,
    F64,
    NAN,
    DraftedRequests,
    VerificationRules,
    random_requests,
    test_impossible_tokens_stay_out,
    test_matching_agrees_with_a_loop,
    test_nan_of_one_request_stays_with_it,
    test_runs_are_those_of_a_loop_over_one_request,
)


def on(device: torch.device | str, arguments: Sequence) -> list:
    return [x.to(device) if isinstance(x, torch.Tensor) else x for x in arguments]


@pytest.fixture
def rules(device: torch.device) -> VerificationRules:
    """The kernels, for the tests of the PyTorch version that are imported above. What they do not
    take is put into the form that they do."""

    def reject(p, drafts, q, *arguments) -> VerifiedTokens:
        if q is None:
            q = (drafts[:, None] == torch.arange(p.shape[1])).to(p.dtype)
        verified = rejection_sample_triton(*on(device, [p, drafts, q, *arguments]))
        return VerifiedTokens(verified.token_ids.cpu(), verified.num_sampled.cpu())

    def match(sampled, drafts, cu_num_logits, width) -> tuple[torch.Tensor, torch.Tensor]:
        arguments = on(device, [sampled, drafts, cu_num_logits, width])
        token_ids, num_sampled = rejection_sampling_batched_triton(*arguments)
        return token_ids.cpu(), num_sampled.cpu()

    return VerificationRules(reject, match)


def check(arguments: Sequence, device: torch.device) -> list[list[int]]:
    """The tokens, after checking that the kernel's are PyTorch's."""
    expected = rejection_sample(*arguments)
    found = rejection_sample_triton(*on(device, arguments))
    for name in ("token_ids", "num_sampled"):
        result, other = getattr(found, name), getattr(expected, name)
        assert result.device.type == device.type and result.dtype == torch.int64
        assert torch.equal(result.cpu(), other), (result, other)
    return expected.token_ids.tolist()


def apart(arguments: Sequence, device: torch.device) -> list:
    """The same numbers, with memory between them that is NaN or 1 and never read."""

    def spread(x):
        if not isinstance(x, torch.Tensor):
            return x
        if x.dim() == 1:
            odd = torch.arange(1, 2 * len(x), 2)
            return x.repeat_interleave(2).index_fill(0, odd, 1).to(device)[::2]
        buffer = torch.full((len(x), 2, x.shape[1] + 4), NAN, dtype=x.dtype, device=device)
        buffer[:, 1, 2:-2] = x.to(device)
        return buffer[:, 1, 2:-2]

    return list(map(spread, arguments))


@pytest.mark.net
@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [*((n, F32) for n in (2, TILE - 2, TILE - 1, TILE, TILE + 7)), (TILE + 7, F64)],
    ids=str,
)
def test_the_tokens_are_those_of_pytorch(vocab_size, dtype, device):
    """In either format, dense and apart, in one tile and in two."""
    requests = random_requests(0, [2, 0, 8, 1], vocab_size, formats=(dtype, dtype))
    arguments = requests.arguments()
    expected = check(arguments, device)
    if vocab_size == 2:
        found = rejection_sample_triton(*apart(arguments, device))
        assert found.token_ids.tolist() == expected
        sampled = arguments[0].argmax(dim=1)
        given = sampled, arguments[1], *arguments[3:5]
        found, _ = rejection_sampling_batched_triton(*apart(given, device))
        assert torch.equal(found.cpu(), rejection_sampling_batched(*given)[0])


BORDERS = [TILE - 1, TILE, 2 * TILE - 1, 2 * TILE + 3]  # the first three at the ends of tiles


@pytest.mark.parametrize("source", ["bonus", "residual"])
def test_at_its_end_a_token_gives_way_to_the_next_one_in_the_next_tile(source, device):
    """Four tokens with a quarter each; numbers at the ends of their intervals and just below."""
    numbers = [0.0, 0.25 - 2.0**-54, 0.25, 0.5 - 2.0**-53, 0.5, 0.75 - 2.0**-53, 0.75, LAST]
    p, q = torch.zeros(2, 1, 2 * TILE + 7)
    p[0, BORDERS] = 0.25
    k = int(source != "bonus")
    draft = 5
    if source == "residual":  # an eighth each is left
        q[0, BORDERS] = 0.125
        q[0, draft] = 0.5
    n = len(numbers)
    requests = DraftedRequests(
        [p.expand(k + 1, -1)] * n,
        [[draft] * k] * n,
        [q.expand(k, -1)] * n,
        [[LAST] * k] * n,
        [[u] * (k + 1) for u in numbers],
    )
    runs = check(requests.arguments(), device)
    assert [run[0] for run in runs] == [token for token in BORDERS for _ in range(2)]


# -- the host


def test_other_probabilities_are_refused(device):
    arguments = on(device, random_requests(8, [1], 5).arguments())
    for index in (0, 2):
        given = list(arguments)
        given[index] = given[index].bfloat16()
        with pytest.raises(ValueError, match=r"must be float32 or float64, .* got .*bfloat16"):
            rejection_sample_triton(*given)


@pytest.mark.gpu
def test_a_graph_of_the_kernels_gives_the_tokens_of_new_numbers():
    """Capturing fails if the host waits for the device."""
    device = torch.device("cuda")
    arguments, others = (random_requests(seed, [3, 0, 2], 5000).arguments() for seed in (10, 11))
    check(arguments, device)  # compiles
    values = on(device, arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        verified = rejection_sample_triton(*values)
    for value, other in zip(values, others, strict=True):
        if isinstance(value, torch.Tensor):
            value.copy_(other)
    graph.replay()
    expected = rejection_sample(*others)
    assert torch.equal(verified.token_ids.cpu(), expected.token_ids)
    assert torch.equal(verified.num_sampled.cpu(), expected.num_sampled)


@pytest.mark.needs("triton")
def test_the_engine_says_the_same_with_kernels(tmp_path, monkeypatch, device):
    """Greedy against the oracle, and without a seed token for token what the PyTorch rule gives."""
    save_random_model(tmp_path)
    oracle = make_oracle(tmp_path, random_prompts(4, vocab_size=97, longest=9, seed=0))
    target, draft = (load_model(tmp_path, torch.float64, device) for _ in range(2))
    weight = draft.model.lm_head.weight
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    weight.data += 0.3 * weight.std() * noise.to(device)
    make = assembly.make_verifier
    tokens = []
    speculative = {"method": "draft", "num_spec_tokens": 2, "adaptive": False}
    config = EngineConfig(num_blocks=100, attention_backend="torch", speculative=speculative)
    for choice in (False, True):
        make_with = lambda *args, choice=choice: make(*args[:-1], choice)  # noqa: E731
        monkeypatch.setattr(assembly, "make_verifier", make_with)
        engine = LLMEngine(config, loaded=target, draft=draft)
        assert (paged_runner(engine).sampler.reject is rejection_sample_triton) == choice
        serve(engine, oracle, [0, 1], 4)
        params = SamplingParams(temperature=0.8, max_tokens=6)
        outputs = engine.generate_batch(oracle.prompts[:2], params)
        tokens.append([output.outputs[0].token_ids for output in outputs.values()])
        stats = engine.stats()
        assert 0 < stats.num_accepted_tokens < stats.num_drafted_tokens
    assert tokens[0] == tokens[1]
