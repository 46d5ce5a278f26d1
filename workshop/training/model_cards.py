"""The model cards of the shipped checkpoints, from the records of their training.

    python workshop/training/model_cards.py

Reads `common/checkpoints/*/training_record.json` and `tiny-draft/evaluation.json`, writes the
`README.md` of each checkpoint, from `card.txt`. No number is typed by hand.
"""

from __future__ import annotations

import json
from pathlib import Path

HERE = Path(__file__).parent
CHECKPOINTS = HERE.parents[1] / "common" / "checkpoints"
CARD = HERE / "card.txt"  # the cards' text, with the names of its numbers in braces

WHAT = {
    "tiny": "The language model that ships with vllm-from-scratch.",
    "tiny-draft": "The draft model for speculative decoding with `tiny`, whose next-token "
    "distribution it was trained to imitate.",
}


def read(path: Path) -> dict:
    return json.loads(path.read_text())


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
    for name in WHAT:
        write_card(name, read(CHECKPOINTS / name / "training_record.json"))


if __name__ == "__main__":
    main()
