"""Train a checkpoint like the one that ships with the repository, from scratch, offline.

    python -m workshop.training.train_tiny --out build/tiny     hours of a CPU

It learns next tokens of the standard library. Matrices are updated with Muon (momentum, then the
nearest semi-orthogonal matrix; K. Jordan, 2024), everything else with AdamW. The learning rate
warms up, stays constant, and falls linearly to zero over the last quarter. Weights are float32
while training (bfloat16 autocast on an accelerator) and bfloat16 in the files.

The shipped model, its draft, which imitates the model's distributions, and the adapter were trained
by the code at commit `6162994a`: their cards say how."""

from __future__ import annotations

import argparse
import json
import platform
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from tqdm import tqdm
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from workshop.training.tiny_data import (
    END_OF_TEXT,
    HELD_OUT,
    PAD,
    VOCAB_SIZE,
    corpus,
    token_stream,
    train_tokenizer,
)
from workshop.training.tiny_eval import evaluate, flops_per_token

MAX_POSITIONS = 2048
SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """Settings of one run. `tokens_total` counts every token trained on, with repetition."""

    tokens_total: int
    batch_tokens: int = 6144
    seq_len: int = 512
    long_seq_len: int = 1024  # while the learning rate falls: positions up to it are trained
    matrix_lr: float = 0.02
    other_lr: float = 3e-3
    weight_decay: float = 0.1  # of the matrices: matters after a few passes over the text
    warmup_steps: int = 40
    decay_share: float = 0.25
    seed: int = 0

    @property
    def num_steps(self) -> int:
        return self.tokens_total // self.batch_tokens

    def lr_scale(self, step: int) -> float:
        """Return the factor of the learning rate: warm-up, constant, then linear to zero."""
        left = (self.num_steps - step) / (self.decay_share * self.num_steps)
        return min(1.0, (step + 1) / self.warmup_steps, left)

    def in_decay(self, step: int) -> bool:
        return step >= self.num_steps * (1 - self.decay_share)


def build_model(seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            **SHAPE,
            vocab_size=VOCAB_SIZE,
            max_position_embeddings=MAX_POSITIONS,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=0,
            pad_token_id=1,
        )
    )


def sample_batch(
    stream: np.ndarray, num_rows: int, seq_len: int, rng: np.random.Generator
) -> torch.Tensor:
    """Draw random windows of the stream: `[num_rows, seq_len + 1]`, int64."""
    starts = rng.integers(0, len(stream) - seq_len - 1, size=num_rows)
    rows = np.stack([stream[s : s + seq_len + 1] for s in starts])
    return torch.from_numpy(rows.astype(np.int64))


def train(config: TrainConfig, out: Path, note_every: int, device: torch.device) -> None:
    """Write the checkpoint and the record of the run to `out`."""
    train_files, held_out = corpus()
    tokenizer = train_tokenizer(list(train_files.values()))
    stream = token_stream(tokenizer, train_files, config.seed)
    model = build_model(config.seed).to(device)  # pyright: ignore[reportArgumentType]
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    optimizers = {
        config.matrix_lr: torch.optim.Muon(matrices, weight_decay=config.weight_decay),
        config.other_lr: torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0),
    }
    is_cpu = device.type == "cpu"
    rng, curve, window = np.random.default_rng(config.seed), [], list[float]()
    started, bar = time.perf_counter(), tqdm(range(config.num_steps), unit="step")
    for step in bar:
        seq_len = config.long_seq_len if config.in_decay(step) else config.seq_len
        batch = sample_batch(stream, config.batch_tokens // seq_len, seq_len, rng).to(device)
        with nullcontext() if is_cpu else torch.autocast(device.type, torch.bfloat16):
            logits = model(input_ids=batch[:, :-1]).logits
            loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        for lr, optimizer in optimizers.items():
            optimizer.param_groups[0]["lr"] = lr * config.lr_scale(step)
            optimizer.step()
            optimizer.zero_grad()
        window.append(loss.item())
        bar.set_postfix(loss=f"{np.mean(window[-50:]):.3f}")
        if (step + 1) % note_every == 0 or step + 1 == config.num_steps:
            curve.append(
                {
                    "tokens": (step + 1) * config.batch_tokens,
                    "train_loss": float(np.mean(window)),
                    "held_out_nats": evaluate(model, tokenizer, held_out, device)["nats_per_token"],
                    "seconds": time.perf_counter() - started,
                }
            )
            window = []
    export(model, tokenizer, config, curve, out)


def export(
    model: Qwen3ForCausalLM,
    tokenizer: Tokenizer,
    config: TrainConfig,
    curve: list[dict],
    out: Path,
) -> None:
    model = model.cpu()
    model.bfloat16().save_pretrained(out)
    GenerationConfig(eos_token_id=0, pad_token_id=1, do_sample=False).save_pretrained(out)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(out)
    record = {
        "config": asdict(config),
        "flops_per_token": flops_per_token(model),
        "corpus": {"python": platform.python_version(), "held_out": list(HELD_OUT)},
        "torch": torch.__version__,
        "curve": curve,
    }
    (out / "training_record.json").write_text(json.dumps(record, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=13_200_000)
    parser.add_argument("--out", type=Path, default=Path("build") / "tiny")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    train(TrainConfig(args.tokens), args.out, 100, torch.device(args.device))


if __name__ == "__main__":
    main()
