"""The target's next-token distributions over the training text, computed once for the draft.

Distillation needs the teacher's output for the same text again and again, and the teacher is six
times the student. So the text is cut into fixed windows, the teacher reads each once, and the
`TOP_K` most likely tokens of every distribution are kept, scaled to sum to one: they carry nearly
all of it. An epoch of the student then costs the student's own arithmetic only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm import trange

TOP_K = 64
WINDOW = 1024


@dataclass(frozen=True, slots=True)
class TeacherTargets:
    """Windows of the stream and the teacher's distribution after each of their positions."""

    input_ids: np.ndarray  # [num_windows, WINDOW] uint16
    token_ids: np.ndarray  # [num_windows, WINDOW, TOP_K] uint16
    probs: np.ndarray  # [num_windows, WINDOW, TOP_K] float16, sums to 1 except for rounding

    def batch(
        self, num_tokens: int, step: int, seed: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the windows of one step: `input_ids [n, WINDOW]`, `token_ids` and `probs
        [n, WINDOW, TOP_K]`. Every window once an epoch, in a seeded order; a function of the step.
        """
        per_step = max(1, num_tokens // WINDOW)
        steps_per_epoch = len(self.input_ids) // per_step
        epoch, place = divmod(step, steps_per_epoch)
        order = np.random.default_rng([seed, epoch]).permutation(len(self.input_ids))
        chosen = np.sort(order[place * per_step : (place + 1) * per_step])
        ids, top, probs = self.input_ids[chosen], self.token_ids[chosen], self.probs[chosen]
        return (
            torch.from_numpy(ids.astype(np.int64)),
            torch.from_numpy(top.astype(np.int64)),
            torch.from_numpy(probs.astype(np.float32)),
        )


@torch.no_grad()
def teacher_targets(
    teacher: torch.nn.Module, stream: np.ndarray, path: Path, device: torch.device
) -> TeacherTargets:
    """Read the targets from `path`, a folder, if it was completed for this stream length; else
    compute and write them there."""
    num_windows = len(stream) // WINDOW
    input_ids = stream[: num_windows * WINDOW].reshape(num_windows, WINDOW)
    shape = (num_windows, WINDOW, TOP_K)
    done, mode = path / f"done-{num_windows}", "r+"
    if not done.exists():
        path.mkdir(parents=True, exist_ok=True)
        mode = "w+"
    token_ids = np.memmap(path / "token_ids.u16", np.uint16, mode, shape=shape)
    probs = np.memmap(path / "probs.f16", np.float16, mode, shape=shape)
    if mode == "w+":
        for i in trange(num_windows, desc="Teacher", unit="window"):
            ids = torch.from_numpy(input_ids[i : i + 1].astype(np.int64)).to(device)
            logits = teacher(input_ids=ids).logits[0].float()
            top = logits.topk(TOP_K, dim=-1)
            token_ids[i] = top.indices.cpu().numpy()
            probs[i] = top.values.softmax(-1).cpu().numpy()
        done.touch()
    return TeacherTargets(input_ids, token_ids, probs)


def distillation_loss(
    logits: torch.Tensor,  # [rows, seq_len, vocab_size]
    token_ids: torch.Tensor,  # [rows, seq_len, TOP_K] int64
    probs: torch.Tensor,  # [rows, seq_len, TOP_K]
) -> torch.Tensor:
    """Cross-entropy of the student against the teacher's most likely tokens, nats a token."""
    logits = logits.float()
    expected = (logits.gather(-1, token_ids) * probs).sum(-1)
    return (logits.logsumexp(-1) * probs.sum(-1) - expected).mean()
