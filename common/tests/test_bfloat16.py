"""What batching may change in bfloat16. Not nothing: sums of another order are rounded differently,
and where two tokens are nearly equally likely the other one wins. So tokens are compared in
float64, and here logits, each request fed with the same tokens: in a batch they are as near to the
float64 model's as alone."""

from __future__ import annotations

import itertools

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from common.engine_config import SHIPPED_ADAPTER, SHIPPED_CHECKPOINT
from common.features.adapters.adapter_slots import AdapterSlots, Ordered, StepAdapters
from common.models.loader import load_model
from common.tests.engine_oracle import Oracle
from common.tests.paged_harness import PagedHarness

NUM_TOKENS = 12  # of each continuation


def teacher_forced(model, oracle: Oracle, size: int, chunk: int = 1000) -> torch.Tensor:
    """Logits [num_prompts, NUM_TOKENS, vocab_size] in float64, along the oracle's continuations:
    `size` requests in a step, in chunks."""
    texts = [p + oracle.expected(i, NUM_TOKENS)[:-1] for i, p in enumerate(oracle.prompts)]
    harness, rows = PagedHarness(model, len(texts)), [[] for _ in texts]
    for first in range(0, len(texts), size):
        for k in range(0, max(map(len, texts)), chunk):
            ids = {i: texts[i][k : k + chunk] for i in range(len(texts))[first : first + size]}
            work = [(i, k, piece) for i, piece in ids.items() if piece]
            logits = harness.step(work).double() if work else torch.empty(0)
            for (i, _, _), each in zip(work, logits.split([len(piece) for *_, piece in work])):
                rows[i].append(each)
    return torch.stack([torch.cat(each)[-NUM_TOKENS:] for each in rows])


@torch.inference_mode()
def test_a_batch_is_as_near_to_the_exact_logits_as_a_request_alone(
    shipped_loaded, shipped_oracle: Oracle
) -> None:
    """The weights are stored in bfloat16, so the float64 model has the same ones: what is left is
    rounding. Of each request the errors of its logits are compared, their root mean square. In
    float64 there is nothing to compare."""
    exact = teacher_forced(shipped_loaded.model, shipped_oracle, 1)
    batched = teacher_forced(shipped_loaded.model, shipped_oracle, 256)
    assert (batched - exact).abs().max() < 1e-10
    model = load_model(SHIPPED_CHECKPOINT, torch.bfloat16, torch.device("cpu")).model

    def errors(*how: int) -> torch.Tensor:
        logits = teacher_forced(model, shipped_oracle, *how)
        return (logits - exact).square().mean(dim=(1, 2)).sqrt()

    alone = errors(1)
    assert (alone > 0).all()
    for how in ((256,), (256, 3), (256, 1)):
        found = errors(*how)
        assert (found <= 1.5 * alone).all(), how
        assert (found <= 0.01 * exact.std()).all(), how


@torch.inference_mode()
def test_adapters_are_as_near_to_the_exact_logits_as_peft_in_that_dtype() -> None:
    """The shipped weights are in bfloat16, and the adapter's scale is 2: what differs is rounding.
    Ours is that of other sums, in both ways in which a step has its adapters, with packed weights
    where this processor can."""
    dtype, generator = torch.bfloat16, torch.Generator().manual_seed(0)
    lens, has_adapter = (9, 24, 16, 30), (True, False, True, False)
    prompts = [torch.randint(1, 4000, (n,), generator=generator).tolist() for n in lens]

    def by_peft(of: torch.dtype) -> torch.Tensor:
        base = AutoModelForCausalLM.from_pretrained(SHIPPED_CHECKPOINT, dtype=of)
        found = {i: base(torch.tensor([ids])).logits[0] for i, ids in enumerate(prompts)}
        model = PeftModel.from_pretrained(base, SHIPPED_ADAPTER, autocast_adapter_dtype=False)
        model = model.to(of)
        found |= {i: model(torch.tensor([prompts[i]])).logits[0] for i in (0, 2)}
        return torch.cat(list(found.values())).double()

    def rms(difference: torch.Tensor) -> torch.Tensor:
        return difference.square().mean().sqrt()

    exact, peft = by_peft(torch.float64), by_peft(dtype)
    model = load_model(SHIPPED_CHECKPOINT, dtype, torch.device("cpu")).model
    slots = AdapterSlots(model, 1, 8)
    slots.take(adapter := slots.read(SHIPPED_ADAPTER))
    slot = slots.bring_in([adapter.digest]).popitem()[1]
    column = slot * torch.tensor(has_adapter).repeat_interleave(torch.tensor(lens))
    order = column.nonzero().flatten()
    rows = Ordered(order, [(slot, 0, len(order))])
    steps = StepAdapters(slots, rows, rows), slots.in_graph(column, torch.arange(sum(lens)))
    for packs, step in itertools.product((False, True), steps):
        if packs and model.pack_weights() is not None:
            break
        work = [(i, 0, ids) for i, ids in enumerate(prompts)]
        found = PagedHarness(model, len(prompts)).step(work, adapter=step).double()
        error = rms(peft - exact)
        assert 0 < rms(found - exact) <= 1.4 * error
        assert rms(found - peft) <= 2 * error and error <= 0.01 * exact.std()
