"""The kernels against the PyTorch version, bit for bit: on a GPU if there is one, else in Triton's
interpreter (`conftest.py` switches it on). The cases of the PyTorch version run over them too.

The interpreter accepts more than the compiler does, so one test compiles the kernels, which needs
no GPU. That the rules are right is for the tests of the PyTorch version to show."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch

import rejection_sampler_triton
from exact_law import LAST
from rejection_sampler import (
    PADDING,
    VerifiedTokens,
    rejection_sample,
    rejection_sampling_batched,
)
from rejection_sampler_triton import (
    TILE,
    rejection_sample_triton,
    rejection_sampling_batched_triton,
)
from test_rejection_sampler import (  # noqa: F401  the tests get this file's `rules`
    ENDS,
    NAN,
    VerificationRules,
    test_a_draft_behind_a_rejected_one_never_counts,
    test_a_placeholder_matches_nothing_not_even_a_row_that_says_nothing,
    test_a_rejection_that_leaves_nothing_draws_from_p,
    test_an_id_that_is_no_token_is_never_emitted_and_its_place_has_the_law_of_p,
    test_arguments_stay_as_they_are,
    test_at_the_quotient_itself_the_product_decides,
    test_both_layouts_of_drafts_agree_with_a_loop,
    test_impossible_tokens_stay_out,
    test_nan_of_one_request_stays_with_it,
    test_the_bonus_token_comes_only_behind_all_drafts,
    test_the_ends_of_intervals_belong_to_the_token_above,
    test_without_any_drafts_each_request_gets_its_sample,
)


@dataclass(frozen=True)
class Arguments:
    """Arguments of `rejection_sample`, on the CPU."""

    target_probs: torch.Tensor
    draft_token_ids: torch.Tensor
    draft_probs: torch.Tensor | None
    cu_num_logits: torch.Tensor
    max_num_drafts: int
    accept_u: torch.Tensor
    sample_u: torch.Tensor

    def values(self, device: torch.device | str = "cpu") -> list:
        """Copies that lie in memory as these do."""
        values = [getattr(self, field.name) for field in fields(self)]
        return [_copy(x, device) if isinstance(x, torch.Tensor) else x for x in values]


def _copy(x: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    num_elements = x.untyped_storage().nbytes() // x.element_size()
    whole = x.as_strided((num_elements,), (1,), 0).to(device, copy=True)
    return whole.as_strided(x.shape, x.stride(), x.storage_offset())


def _starts(lengths: Sequence[int]) -> np.ndarray:
    return np.cumsum([0, *(k + 1 for k in lengths)])


def make_arguments(
    target_probs: torch.Tensor | np.ndarray,
    draft_token_ids: Sequence[int],
    draft_probs: torch.Tensor | np.ndarray | None,
    lengths: Sequence[int],  # drafts of each request
    accept_u: Sequence[float],
    sample_u: Sequence[float],
    dtype: torch.dtype = torch.float32,
    num_extra: int = 0,
) -> Arguments:
    return Arguments(
        torch.as_tensor(target_probs, dtype=dtype),
        torch.as_tensor(draft_token_ids, dtype=torch.int64),
        None if draft_probs is None else torch.as_tensor(draft_probs, dtype=dtype),
        torch.from_numpy(_starts(lengths)),
        max(lengths, default=0) + num_extra,
        torch.as_tensor(accept_u, dtype=torch.float64),
        torch.as_tensor(sample_u, dtype=torch.float64),
    )


def random_arguments(
    seed: int,
    lengths: Sequence[int],
    vocab_size: int,
    dtype: torch.dtype = torch.float32,
    is_certain: bool = False,
    num_extra: int = 0,
) -> Arguments:
    """Ragged. At each draft some other relation of p and q; some numbers are 0 or LAST; the last
    lane of four or more is padding."""
    rng = np.random.default_rng([seed, vocab_size, is_certain])
    num_drafts, num_rows = sum(lengths), sum(lengths) + len(lengths)
    p = rng.gamma(0.3, size=(num_rows, vocab_size)) + 1e-9
    q = rng.gamma(0.3, size=(num_drafts, vocab_size)) + 1e-9
    drafts = rng.integers(vocab_size, size=num_drafts)
    is_draft = np.ones(num_rows, dtype=bool)
    is_draft[_starts(lengths)[1:] - 1] = False
    for j, row in enumerate(np.flatnonzero(is_draft)):
        side = rng.random(vocab_size) < 0.5
        side[0] = True
        match rng.integers(8):
            case 0:  # disjoint
                p[row], q[j] = p[row] * side, q[j] * ~side
            case 1:  # zeros
                p[row], q[j] = p[row] * side, q[j] * side[::-1]
            case 2:
                p[row] = q[j]
            case 3:
                p[row] = q[j] * (1 + 1e-6 * rng.standard_normal(vocab_size))
            case 4 | 5 | 6:  # both like the draft
                p[row, drafts[j]] += 3 * p[row].sum()
                q[j, drafts[j]] += 6 * q[j].sum()
    if vocab_size > 3:
        p[:, -1] = q[:, -1] = 0
    q[:, 0] += 1e-30
    p, q = (x / x.sum(axis=1, keepdims=True) for x in (p, q))

    def numbers(n: int) -> np.ndarray:
        return np.where(rng.random(n) < 0.3, rng.choice(ENDS, size=n), rng.random(n))

    return make_arguments(
        p, drafts, None if is_certain else q, lengths, numbers(num_drafts), numbers(num_rows),
        dtype, num_extra,
    )  # fmt: skip


def check(arguments: Arguments, device: torch.device) -> VerifiedTokens:
    """Return PyTorch's result on the CPU, after checking that the kernel's is equal."""
    expected = rejection_sample(*arguments.values())
    verified = rejection_sample_triton(*arguments.values(device))
    for result, other in (
        (verified.token_ids, expected.token_ids),
        (verified.num_sampled, expected.num_sampled),
    ):
        assert result.device.type == device.type and result.dtype == torch.int64
        assert torch.equal(result.cpu(), other), (result, other)
    return expected


@pytest.fixture
def rules(device: torch.device) -> VerificationRules:
    """The kernels, for the tests of the PyTorch version that are imported above."""

    def on_device(*arguments) -> list:
        return [x.to(device) if isinstance(x, torch.Tensor) else x for x in arguments]

    def reject(*arguments) -> VerifiedTokens:
        verified = rejection_sample_triton(*on_device(*arguments))
        return VerifiedTokens(verified.token_ids.cpu(), verified.num_sampled.cpu())

    def match(*arguments) -> tuple[torch.Tensor, torch.Tensor]:
        token_ids, num_sampled = rejection_sampling_batched_triton(*on_device(*arguments))
        return token_ids.cpu(), num_sampled.cpu()

    return VerificationRules(reject, match)


# -- bit for bit

F32, F64 = torch.float32, torch.float64
FORMATS = [  # vocabulary, p, q, and the ids
    *((n, F32, F32, torch.int64) for n in (1, 2, 31, 128, 1000, 2055, TILE - 1, TILE, TILE + 1)),
    *((n, F64, F64, torch.int64) for n in (2, 1000, 2 * TILE + 7)),
    (2 * TILE + 7, F32, F32, torch.int64),
    (200, F32, F64, torch.int32),
    (200, F64, F32, torch.int32),
]


def apart(arguments: Arguments) -> Arguments:
    """The same numbers, with memory between them that is NaN or 1 and never read."""
    strided = {"max_num_drafts": arguments.max_num_drafts}
    for name, x in vars(arguments).items():
        if isinstance(x, torch.Tensor) and x.dim() == 2:
            buffer = torch.full((len(x), 2, x.shape[1] + 4), NAN, dtype=x.dtype)
            strided[name] = buffer[:, 1, 2:-2]
            strided[name].copy_(x)
        elif x is None:
            strided[name] = None
        elif isinstance(x, torch.Tensor):
            odd = torch.arange(1, 2 * len(x), 2)
            strided[name] = x.repeat_interleave(2).index_fill(0, odd, 1)[::2]
    return Arguments(**strided)


@pytest.mark.net
@pytest.mark.parametrize(("vocab_size", "p", "q", "ids"), FORMATS, ids=str)
def test_the_tokens_are_those_of_pytorch(vocab_size, p, q, ids, device):
    """In every format, dense and apart, with probabilities and without."""
    for seed, lengths in enumerate(([2, 0, 3, 1, 5], [0, 8, 3])):
        arguments = random_arguments(seed, lengths, vocab_size, F64, is_certain=seed > 0)
        arguments = replace(
            arguments,
            target_probs=arguments.target_probs.to(p),
            draft_probs=None if seed else arguments.draft_probs.to(q),
            draft_token_ids=arguments.draft_token_ids.to(ids),
            cu_num_logits=arguments.cu_num_logits.to(ids),
        )
        expected = check(arguments, device)
        if vocab_size in (200, TILE + 1):
            assert torch.equal(check(apart(arguments), device).token_ids, expected.token_ids)


BORDERS = [TILE - 1, TILE, 2 * TILE - 1, 2 * TILE + 3]  # the first three at the ends of tiles


@pytest.mark.parametrize("source", ["bonus", "residual", "one-hot"])
def test_at_its_end_a_token_gives_way_to_the_next_one_in_the_next_tile(source, device):
    """Four tokens with a quarter each; numbers at the ends of their intervals and just below."""
    numbers = [0.0, 0.25 - 2.0**-54, 0.25, 0.5 - 2.0**-53, 0.5, 0.75 - 2.0**-53, 0.75, LAST]
    p, q = torch.zeros(2, 1, 2 * TILE + 7)
    p[0, BORDERS] = 0.25
    lengths, draft = [1], 5
    if source == "bonus":
        lengths = [0]
    elif source == "residual":  # an eighth each is left
        q[0, BORDERS] = 0.125
        q[0, draft] = 0.5
    else:
        p[0, BORDERS], p[0, draft] = 0.125, 0.5
    n = len(numbers)
    num_rows, num_drafts = n * (lengths[0] + 1), n * lengths[0]
    arguments = make_arguments(
        p.expand(num_rows, -1),
        [draft] * num_drafts,
        None if source == "one-hot" else q.expand(num_drafts, -1),
        lengths * n,
        [LAST] * num_drafts,
        np.repeat(numbers, lengths[0] + 1),
    )
    assert arguments.target_probs.stride(0) == 0
    runs = check(arguments, device).token_ids[:, 0].tolist()
    assert runs == [token for token in BORDERS for _ in range(2)]


def test_the_remainder_after_rounding_of_several_tiles_is_drawn_from_p(device):
    """Nothing at all, or less than an integer: the second walk ends in the last tile."""
    p = torch.zeros(4, TILE + 3)
    q = torch.zeros(4, TILE + 3)
    p[:, 1], q[:, 1] = 0.99999994, 1.0
    p[2:, TILE], q[2:, TILE] = 0.5, 0.5
    p[2:, 1], q[2:, 1] = 0.5, 0.50000006
    p[1::2, 7] = 1e-20
    arguments = make_arguments(
        p.repeat_interleave(2, dim=0), [1] * 4, q, [1] * 4, [LAST] * 4, [0.75] * 8
    )
    expected = [[1, PADDING]] * 2 + [[TILE, PADDING]] * 2
    assert check(arguments, device).token_ids.tolist() == expected
    certain = check(replace(arguments, draft_probs=None), device)
    assert certain.token_ids[:2].tolist() == expected[:2]


def test_roundings_by_hand_and_rows_that_are_never_read(device):
    """In float32, 0.5 - 2**-27 is 0.5; in a wider format, token 0 would end below this number. Each
    q is rounded to the format of p where it is subtracted, not where it is compared."""
    p, q = [0.5, 0.5, 0.0], [2.0**-27, 0.0, 1.0]
    arguments = make_arguments([p] * 2, [2], [q], [1], [0.0], [0.5 - 2.0**-40, 0.0])
    assert check(arguments, device).token_ids.tolist() == [[0, PADDING]]
    # q is less than float32 can tell from 1; p is what float32 makes of 1.
    q = torch.tensor([[1 + 2.0**-40, 0.0]], dtype=F64)
    arguments = make_arguments([[1.0, 0.0]] * 2, [0], q, [1], [LAST], [0.0] * 2)
    assert check(replace(arguments, draft_probs=q), device).num_sampled.tolist() == [1]
    assert check(arguments, device).num_sampled.tolist() == [2]
    # Rows after a rejected draft
    p = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0], [NAN] * 3, [NAN] * 3])
    q = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [NAN] * 3])
    for given, u in ((q, 0.5), (None, 0.25)):
        arguments = make_arguments(p, [1, 0, 2], given, [3], [u, 0.0, 0.0], [0.0, 0.5, NAN, NAN])
        assert check(arguments, device).token_ids.tolist() == [[1, 2, PADDING, PADDING]]


def test_every_number_of_the_result_is_written_and_none_beside_it(device, monkeypatch):
    empty, buffers = torch.empty, []

    def guarded(*size: int, **kind) -> torch.Tensor:
        buffers.append(empty(math.prod(size) + 64, **kind).fill_(77))
        return buffers[-1][32:-32].view(size)

    monkeypatch.setattr(torch, "empty", guarded)
    for num_extra in (0, 1, 2):
        check(random_arguments(3, [1, 0, 3], 40, num_extra=num_extra), device)
        check_matching(*random_samples(3, [1, 0, 3], device), 3 + num_extra)
    assert len(buffers) == 12
    assert all((x[:32] == 77).all() and (x[-32:] == 77).all() for x in buffers)


# -- the matching rule


def random_samples(
    seed: int, lengths: Sequence[int], device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two of three samples are 1, and half of the drafts."""
    rng = np.random.default_rng(seed)
    num_drafts = sum(lengths)
    sampled = rng.integers(3, size=num_drafts + len(lengths)).clip(max=1)
    drafts = rng.integers(2, size=num_drafts)
    return tuple(torch.from_numpy(x).to(device) for x in (sampled, drafts, _starts(lengths)))


def check_matching(
    sampled: torch.Tensor, drafts: torch.Tensor, cu_num_logits: torch.Tensor, num_steps: int
) -> torch.Tensor:
    expected = rejection_sampling_batched(sampled, drafts, cu_num_logits, num_steps)
    results = rejection_sampling_batched_triton(sampled, drafts, cu_num_logits, num_steps)
    for result, other in zip(results, expected, strict=True):
        assert result.device == sampled.device and result.dtype == torch.int64
        assert torch.equal(result, other), (result, other)
    return expected[1]


def test_samples_in_other_formats_and_strides(device):
    sampled, drafts, cu_num_logits = random_samples(1, [3, 0, 8, 1], device)
    sampled[5:13] = drafts[3:11]  # eight are accepted, and the token after them is there
    expected = check_matching(sampled, drafts, cu_num_logits, 8)
    assert expected.tolist()[2] == 9
    apart = [x.int().repeat_interleave(2)[::2] for x in (sampled, drafts, cu_num_logits)]
    tokens, num_sampled = rejection_sampling_batched_triton(*apart, 8)
    assert torch.equal(num_sampled, expected) and tokens.dtype == torch.int64


# -- the host


def test_other_probabilities_are_refused(device):
    arguments = random_arguments(8, [1], 5)
    for name in ("target_probs", "draft_probs"):
        probs = getattr(arguments, name)
        with pytest.raises(ValueError, match=f"{name} must .*float32.*float64, got torch.bfloat16"):
            rejection_sample_triton(*replace(arguments, **{name: probs.bfloat16()}).values(device))
        with pytest.raises(ValueError, match=rf"{name} must .*strides .* call .contiguous\(\)"):
            columns = probs.repeat_interleave(2, dim=1)[:, ::2]
            rejection_sample_triton(*replace(arguments, **{name: columns}).values(device))


class NoKernel:
    def __getitem__(self, grid):
        return lambda *arguments, **options: None


@pytest.mark.parametrize("is_certain", [False, True])
def test_the_host_reads_no_value(is_certain, monkeypatch):
    """On the device `meta` there are none, so a step that waits for the device is an error."""
    for kernel in ("_rejection_kernel", "_matching_kernel"):
        monkeypatch.setattr(rejection_sampler_triton, kernel, NoKernel())
    arguments = random_arguments(9, [2, 0, 1], 10, is_certain=is_certain).values()
    arguments = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in arguments]
    assert rejection_sample_triton(*arguments).token_ids.shape == (3, 3)
    samples = random_samples(0, [2, 0, 1], "meta")
    assert rejection_sampling_batched_triton(*samples, 2)[0].shape == (3, 3)


@pytest.mark.gpu
def test_a_graph_of_the_kernels_gives_the_tokens_of_new_numbers():
    """Capturing fails if the host waits for the device."""
    device = torch.device("cuda")
    arguments, others = (random_arguments(seed, [3, 0, 2], 5000) for seed in (10, 11))
    values = arguments.values(device)
    check(arguments, device)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        verified = rejection_sample_triton(*values)
    for value, other in zip(values, others.values(device), strict=True):
        if isinstance(value, torch.Tensor):
            value.copy_(other)
    graph.replay()
    expected = rejection_sample(*others.values())
    assert torch.equal(verified.token_ids.cpu(), expected.token_ids)
    assert torch.equal(verified.num_sampled.cpu(), expected.num_sampled)


# -- without Triton, without a GPU, and for a GPU that is not there

ASK = """
x, cu, u = torch.ones(1, 1), torch.tensor([0, 1]), torch.zeros(1, dtype=torch.float64)
for ask in (
    lambda: module.rejection_sample_triton(x, cu[:0], None, cu, 0, u[:0], u),
    lambda: module.rejection_sampling_batched_triton(cu[:1], cu[:0], cu, 0),
):
    try:
        ask()
    except RuntimeError as error:
        print(error)
"""

WITHOUT_TRITON = """
import importlib, sys
import torch
sys.modules["triton"] = None
import rejection_sampler_triton as module
"""

WITH_TRITON = """
print("with triton")
del sys.modules["triton"], sys.modules["triton_or_none"]
importlib.reload(module)
"""

COMPILE = """
print("compile")
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TYPES = {"target_probs": "*fp32", "draft_probs": "*fp32", "accept_u": "*fp64", "sample_u": "*fp64"}
ADDRESSES = ("num_sampled", "cu_num_logits", "target_sampled")

def type_of(name, constants):
    if name in constants:
        return "constexpr"
    is_address = "token" in name or name in ADDRESSES
    return TYPES.get(name, "*i64" if is_address else "i32")

def build(kernel, constants):
    signature = {name: type_of(name, constants) for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constexprs=constants)
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    assert "ftz" not in text, "small numbers become 0"
    assert "fma" not in text, "products are not rounded"

rejection = {"SCALE": module.SCALE, "PADDING": -1, "TILE": module.TILE}
rejection |= {"TARGET_STRIDE": 5000, "DRAFT_STRIDE": 5000}
build(module._rejection_kernel, rejection | {"IS_ONE_HOT": False, "WIDTH": 8, "MAX_TILES": 64})
one = {"WIDTH": 1, "MAX_TILES": 1, "TARGET_STRIDE": 1}
build(module._rejection_kernel, rejection | {"IS_ONE_HOT": True} | one)
build(module._matching_kernel, {"PADDING": -1, "IS_FED": True, "WIDTH": 8})
build(module._matching_kernel, {"PADDING": -1, "IS_FED": False, "WIDTH": 2})
print("done")
"""


@pytest.fixture(scope="module")
def output() -> list[str]:
    """The output of a process without the interpreter: without Triton, with it, and where it
    compiles."""
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    environment["TRITON_CACHE_DIR"] = str(Path(__file__).parents[2] / "build" / "triton")
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON + ASK + WITH_TRITON + ASK + COMPILE],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    first, _, rest = result.stdout.partition("with triton\n")
    second, _, rest = rest.partition("compile\n")
    return [first, second, rest + result.stderr]


@pytest.mark.parametrize(
    ("part", "message"), [(0, "pip install triton"), (1, "TRITON_INTERPRET=1")]
)
def test_importing_works_anywhere_and_a_missing_dependency_is_explained(output, part, message):
    assert output[part].count(message) == 2, output
    assert output[part].count("PyTorch version in rejection_sampler.py") == 2


def test_the_kernels_compile_for_a_gpu_and_round_as_the_interpreter_does(output):
    assert output[2].startswith("done\n"), output[2]
