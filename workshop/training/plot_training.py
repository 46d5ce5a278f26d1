"""The loss curves of the shipped checkpoints, and their model cards, from the records of the runs.

    python workshop/training/plot_training.py

Reads `common/checkpoints/*/training_record.json` and `tiny-draft/evaluation.json`, writes
`workshop/figures/training.svg` and the `README.md` of each checkpoint, from `card.txt`. No
number is typed by hand.
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from workshop.book.figure_file import save
from workshop.book.figure_words import Words
from workshop.book.palette import DRAFT, INK, label_line

HERE = Path(__file__).parent
CHECKPOINTS = HERE.parents[1] / "common" / "checkpoints"
CARD = HERE / "card.txt"  # the cards' text, with the names of its numbers in braces
ROLES = {"tiny": "target", "tiny-draft": "draft"}

WHAT = {
    "tiny": "The language model that ships with vllm-from-scratch.",
    "tiny-draft": "The draft model for speculative decoding with `tiny`, whose next-token "
    "distribution it was trained to imitate.",
}


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def draw(records: dict[str, dict]) -> Figure:
    figure, axes = plt.subplots(figsize=(8.5, 4.4), layout="constrained")
    for (name, record), color in zip(records.items(), (INK, DRAFT), strict=True):
        tokens = [point["tokens"] / 1e6 for point in record["curve"]]
        losses = [point["held_out_nats"] for point in record["curve"]]
        axes.plot(tokens, losses, "o-", color=color)
        label_line(axes, tokens[-1], losses[-1], name, color)
    axes.set(xlabel="tokens trained on, millions", ylabel="held-out loss, nats a token")
    axes.set_title("Training of the shipped checkpoints")
    axes.margins(x=0.12)
    axes.grid()
    return figure


def write_card(name: str, record: dict) -> None:
    folder = CHECKPOINTS / name
    config = read(folder / "config.json")
    agreement = ""
    if name == "tiny-draft":
        evaluation = read(folder / "evaluation.json")
        agreement = (
            f"| agreement | on {evaluation['greedy_agreement']:.1%} of held-out positions its "
            "most likely token is `tiny`'s |\n"
            f"| cost | {evaluation['flops_ratio']:.1f} times fewer FLOPs a token than `tiny` |\n"
        )
    hardware = record["hardware"]
    text = CARD.read_text(encoding="utf-8").format(
        name=name,
        what=WHAT[name],
        command=record["command"],
        tokens=record["config"]["tokens_total"] / 1e6,
        python=record["corpus"]["python"],
        device=f"{hardware['threads']} threads of a {hardware['machine']} CPU"
        if hardware["device"] == "cpu"
        else hardware["device"],
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        parameters=record["parameters"],
        flops=record["flops_per_token"],
        vocab=config["vocab_size"],
        context=record["config"]["long_seq_len"],
        nats32=record["held_out_float32"]["nats_per_token"],
        bits32=record["held_out_float32"]["bits_per_byte"],
        nats16=record["held_out_bfloat16"]["nats_per_token"],
        bits16=record["held_out_bfloat16"]["bits_per_byte"],
        agreement=agreement,
        held_out=", ".join(f"`{path}`" for path in record["corpus"]["held_out"]),
    )
    (folder / "README.md").write_text(text)


def main() -> None:
    records = {name: read(CHECKPOINTS / name / "training_record.json") for name in ROLES}
    save({"training": lambda: draw(records)}, HERE.parent / "figures", Words())
    for name, record in records.items():
        write_card(name, record)
    print("wrote workshop/figures/training.svg and the model cards")


if __name__ == "__main__":
    main()
