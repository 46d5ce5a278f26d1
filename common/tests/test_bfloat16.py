"""What batching may change in bfloat16. Not nothing: sums of another order are rounded differently,
and where two tokens are nearly equally likely the other one wins. So tokens are compared in
float64, and here logits, each request fed with the same tokens: in a batch they are as near to the
float64 model's as alone."""

from __future__ import annotations

import torch

from common.engine_config import SHIPPED_CHECKPOINT
from common.models.loader import load_model
from common.tests.engine_oracle import Oracle
from common.tests.paged_harness import PagedHarness

NUM_TOKENS = 12  # of each continuation


def teacher_forced(model, oracle: Oracle, size: int, chunk: int = 1000) -> torch.Tensor:
    """Logits [num_prompts, NUM_TOKENS, vocab_size] in float64, along the oracle's continuations:
    `size` requests in a step, in chunks."""
    texts = [p + oracle.expected(i, NUM_TOKENS)[:-1] for i, p in enumerate(oracle.prompts)]
    harness = PagedHarness(model, len(texts))
    rows = [[] for _ in texts]
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
