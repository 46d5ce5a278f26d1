"""The quality of the shipped checkpoints: held-out loss of both, and how often they agree.

Losses are reported in nats per token and, because that depends on the tokenizer, in bits per byte
of text. The agreement is the share of held-out positions where draft and target find the same next
token most likely: chapter 5's speculation depends on it."""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

from workshop.training.tiny_data import END_OF_TEXT

CHECKPOINTS = Path(__file__).resolve().parents[3] / "common" / "checkpoints"


def held_out_windows(
    tokenizer: Tokenizer, held_out: dict[str, str], seq_len: int
) -> list[torch.Tensor]:
    """Return every held-out token once as a target, in windows of one file each:
    `[1, <= seq_len + 1]` ids."""
    windows = []
    for text in held_out.values():
        end = tokenizer.token_to_id(END_OF_TEXT)
        ids = torch.tensor([end, *tokenizer.encode(text).ids, end])
        windows += [ids[s : s + seq_len + 1][None] for s in range(0, len(ids) - 1, seq_len)]
    return windows


@torch.no_grad()
def evaluate(
    model: torch.nn.Module,
    tokenizer: Tokenizer,
    held_out: dict[str, str],
    device: torch.device,
    seq_len: int = 512,
) -> dict[str, float]:
    """Return the held-out loss: nats per token and, independent of the tokenizer, bits per byte of
    the text."""
    model.eval()
    nats, num_tokens = 0.0, 0
    for window in held_out_windows(tokenizer, held_out, seq_len):
        window = window.to(device)
        logits = model(input_ids=window[:, :-1]).logits[0].float()
        nats += F.cross_entropy(logits, window[0, 1:], reduction="sum").item()
        num_tokens += window.size(1) - 1
    model.train()
    num_bytes = sum(len(text.encode()) for text in held_out.values())
    return {
        "nats_per_token": nats / num_tokens,
        "bits_per_byte": nats / math.log(2) / num_bytes,
        "num_tokens": num_tokens,
        "num_bytes": num_bytes,
    }


@torch.no_grad()
def greedy_agreement(
    target: torch.nn.Module, draft: torch.nn.Module, tokenizer: Tokenizer, held_out: dict[str, str]
) -> float:
    """Share of held-out positions where both models' most likely next token is the same."""
    same, total = 0, 0
    for window in held_out_windows(tokenizer, held_out, seq_len=512):
        ours, theirs = (m(input_ids=window[:, :-1]).logits.argmax(-1) for m in (target, draft))
        same += (ours == theirs).sum().item()
        total += ours.numel()
    return same / total


def load(path: Path) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
