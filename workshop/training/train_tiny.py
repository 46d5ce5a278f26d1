"""Train the checkpoint that ships with the repository, from scratch, offline.

    python -m workshop.training.train_tiny target --out common/checkpoints/tiny
    python -m workshop.training.train_tiny evaluate

It is trained on next tokens of the standard library. (The draft, which imitates the target's
distributions, and the adapter were trained by code at commit `6162994a`: their cards say how.)

Matrices are updated with Muon (momentum, then the nearest semi-orthogonal matrix; K. Jordan, 2024),
everything else with AdamW. The learning rate warms up, stays constant, and falls linearly to zero
over the last part of the run, so that a run can be lengthened until its last part begins. A run is
seeded and can be resumed: the state is written to `--state` every `--save-every` steps, and a
second start continues from there.

Weights are float32 while training (bfloat16 autocast on an accelerator) and bfloat16 in the files.
"""

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
from workshop.training.tiny_eval import CHECKPOINTS, evaluate, flops_per_token, load, report

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
    long_seq_len: int = (
        1024  # used while the learning rate falls, so that positions up to it are trained
    )
    matrix_lr: float = 0.02
    other_lr: float = 3e-3
    weight_decay: float = (
        0.1  # of the matrices, decoupled: matters after a few passes over the text
    )
    warmup_steps: int = 40
    decay_share: float = 0.25
    seed: int = 0

    @property
    def num_steps(self) -> int:
        return self.tokens_total // self.batch_tokens

    @property
    def command(self) -> str:
        return (
            f"python -m workshop.training.train_tiny target "
            f"--tokens {self.tokens_total} "
            f"--batch-tokens {self.batch_tokens}"
        )

    def lr_scale(self, step: int) -> float:
        """Return the factor of the learning rate: warm-up, constant, then linear to zero."""
        left = (self.num_steps - step) / (self.decay_share * self.num_steps)
        return min(1.0, (step + 1) / self.warmup_steps, left)

    def in_decay(self, step: int) -> bool:
        return step >= self.num_steps * (1 - self.decay_share)


class Muon(torch.optim.Optimizer):
    """Momentum whose matrix updates are replaced by the nearest semi-orthogonal matrix.

    As `torch.optim.Muon`, except that the Newton-Schulz iteration runs in the parameters' own dtype
    (bfloat16 is emulated, and slow, on CPUs without support for it) and once for all matrices of
    one shape."""

    _COEFFICIENTS = (3.4445, -4.7750, 2.0315)

    def __init__(
        self,
        params: list[torch.nn.Parameter],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @classmethod
    def _orthogonalise(
        cls, update: torch.Tensor, steps: int = 5
    ) -> torch.Tensor:  # [n, rows, cols]
        a, b, c = cls._COEFFICIENTS
        tall = update.size(1) > update.size(2)
        x = update.mT if tall else update
        x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
        for _ in range(steps):
            gram = x @ x.mT
            x = a * x + (b * gram + c * gram @ gram) @ x
        return x.mT if tall else x

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[torch.nn.Parameter]] = {}
            for p in group["params"]:
                by_shape.setdefault(p.shape, []).append(p)
            for shape, params in by_shape.items():
                updates = []
                for p in params:
                    assert p.grad is not None
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    momentum.lerp_(p.grad, 1 - group["momentum"])
                    updates.append(p.grad.lerp(momentum, group["momentum"]))  # Nesterov
                lr = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                kept = 1 - group["lr"] * group["weight_decay"]
                for p, update in zip(
                    params, self._orthogonalise(torch.stack(updates)), strict=True
                ):
                    p.mul_(kept).add_(update, alpha=-lr)


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


def train(
    config: TrainConfig, out: Path, state_path: Path, save_every: int, device: torch.device
) -> None:
    train_files, held_out = corpus()
    tokenizer = prepare_tokenizer(train_files, state_path)
    stream = token_stream(tokenizer, train_files, config.seed)
    model = build_model(config.seed).to(device)  # pyright: ignore[reportArgumentType]
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    optimizers = [
        Muon(matrices, lr=config.matrix_lr, weight_decay=config.weight_decay),
        torch.optim.AdamW(others, lr=config.other_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    autocast = (
        torch.autocast(device.type, torch.bfloat16) if device.type != "cpu" else nullcontext()
    )

    first, curve, commands = 0, [], []
    if state_path.exists():
        state = torch.load(state_path, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
            optimizer.param_groups[0].setdefault("weight_decay", 0.0)
        first, curve, commands = state["step"], state["curve"], state["commands"]
        optimizers[0].param_groups[0]["weight_decay"] = config.weight_decay
    if not commands or commands[-1] != config.command:  # a longer run continues a shorter one
        commands.append(config.command)
    base_lrs = [config.matrix_lr, config.other_lr]
    seconds_before = curve[-1]["seconds"] if curve else 0.0
    started = time.perf_counter()
    bar = tqdm(range(first, config.num_steps), initial=first, total=config.num_steps, unit="step")
    window: list[float] = []
    for step in bar:
        for optimizer, base in zip(optimizers, base_lrs, strict=True):
            optimizer.param_groups[0]["lr"] = base * config.lr_scale(step)
        with autocast:
            # A function of the step, so a resumed run repeats nothing.
            rng = np.random.default_rng([config.seed, step])
            seq_len = config.long_seq_len if config.in_decay(step) else config.seq_len
            batch = sample_batch(stream, config.batch_tokens // seq_len, seq_len, rng).to(device)
            logits = model(input_ids=batch[:, :-1]).logits
            loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        window.append(loss.item())
        bar.set_postfix(loss=f"{np.mean(window[-50:]):.3f}")
        if (step + 1) % save_every == 0 or step + 1 == config.num_steps:
            curve.append(
                {
                    "tokens": (step + 1) * config.batch_tokens,
                    "train_loss": float(np.mean(window)),
                    "held_out_nats": evaluate(model, tokenizer, held_out, device)["nats_per_token"],
                    "seconds": seconds_before + time.perf_counter() - started,
                }
            )
            window = []
            saved = {
                "model": model.state_dict(),
                "optimizers": [o.state_dict() for o in optimizers],
                "step": step + 1,
                "curve": curve,
                "commands": commands,
            }
            torch.save(saved, state_path.with_suffix(".new"))
            state_path.with_suffix(".new").replace(state_path)
            tqdm.write(json.dumps(curve[-1]))
    export(model, tokenizer, config, curve, commands, held_out, out, device)


def prepare_tokenizer(train_files: dict[str, str], state_path: Path) -> Tokenizer:
    path = state_path.with_suffix(".tokenizer.json")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        train_tokenizer(list(train_files.values())).save(str(path))
    return Tokenizer.from_file(str(path))


def export(
    model: Qwen3ForCausalLM,
    tokenizer: Tokenizer,
    config: TrainConfig,
    curve: list[dict],
    commands: list[str],
    held_out: dict[str, str],
    out: Path,
    device: torch.device,
) -> None:
    """Write a Hugging Face checkpoint in bfloat16, and the record of the run next to it."""
    before = evaluate(model, tokenizer, held_out, device)
    model.to(torch.bfloat16)  # pyright: ignore[reportArgumentType]
    model.save_pretrained(out)
    GenerationConfig(eos_token_id=0, pad_token_id=1, do_sample=False).save_pretrained(out)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(out)
    after = evaluate(load(out), tokenizer, held_out, torch.device("cpu"))
    record = {
        "command": " && ".join(commands),
        "config": asdict(config),
        "parameters": sum(p.numel() for p in model.parameters()),
        "flops_per_token": flops_per_token(model),
        "corpus": {"python": platform.python_version(), "held_out": list(HELD_OUT)},
        "torch": torch.__version__,
        "hardware": {
            "device": str(device),
            "machine": platform.machine(),
            "threads": torch.get_num_threads(),
        },
        "held_out_float32": before,
        "held_out_bfloat16": after,
        "curve": curve,
    }
    (out / "training_record.json").write_text(json.dumps(record, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("role", choices=["target", "evaluate"])
    parser.add_argument("--tokens", type=int, default=8_400_000)
    parser.add_argument("--batch-tokens", type=int, default=6144)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--state", type=Path)
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    if args.role == "evaluate":
        return report()
    out = args.out or CHECKPOINTS / "tiny"
    state = args.state or Path("build") / "train_target.pt"
    state.parent.mkdir(parents=True, exist_ok=True)
    config = TrainConfig(args.tokens, batch_tokens=args.batch_tokens)
    train(config, out, state, args.save_every, torch.device(args.device))


if __name__ == "__main__":
    main()
