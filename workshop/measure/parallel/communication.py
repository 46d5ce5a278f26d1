"""What a rank says in a step, by formula. The tests hold it against what `Collectives` counted.

    embedding   one all-reduce of [num_tokens, hidden_size]               the first stage
    a layer     two all-reduces: after o, after down                      each stage, of its layers
    head        one all-gather of [num_logit_rows, vocab_size / ranks]    the last stage
    a border    one send of [num_tokens, hidden_size]                     all stages but the last

In the last layer of all, only the rows that need logits go on after attention.

    python -m workshop.parallel.communication          the table of README.md, by formula
    python -m workshop.parallel.communication --write  into README.md

The table is of a decode step in bfloat16. What a rank gains is reading: a step reads all of a
process's weights, however few rows it has."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from common.engine_config import SHIPPED_CHECKPOINT
from common.model import DecoderModel
from common.model_config import ModelConfig
from common.parallel.collectives import Communication
from common.parallel.ranks import Ranks
from common.parallel.sharded_layers import rows_per_rank
from common.parallel.sharded_model import rank_config
from workshop.measure.bench.bench_record import table_of, write_between_markers
from workshop.measure.bench.random_weights import QWEN3_0_6B

README = Path(__file__).parents[3] / "common" / "parallel" / "README.md"
NUM_REQUESTS, ITEMSIZE, SIZES = 32, 2, (2, 4)
QWEN3_32B = replace(  # https://huggingface.co/Qwen/Qwen3-32B
    QWEN3_0_6B,
    hidden_size=5120,
    intermediate_size=25600,
    num_hidden_layers=64,
    num_attention_heads=64,
    tie_word_embeddings=False,
)


def step_communication(
    config: ModelConfig, ranks: Ranks, num_tokens: int, num_logit_rows: int, itemsize: int
) -> Communication:
    """Of one rank in one step; `itemsize` in bytes. What it hands over: on the wire are more."""
    row_bytes, said = config.hidden_size * itemsize, Communication()
    if ranks.tensor_parallel_size > 1:
        num_rows = [num_tokens] * (2 * len(ranks.layers(config.num_hidden_layers)))
        num_rows += [num_tokens] * ranks.is_first_stage
        if ranks.is_last_stage:
            num_rows[:2] = [num_logit_rows] * 2
            num_lanes = rows_per_rank(config.vocab_size, ranks.tensor_parallel_size)
            said.num_all_gathers = 1
            said.num_bytes += num_logit_rows * num_lanes * itemsize
        said.num_all_reduces = len(num_rows)
        said.num_bytes += sum(num_rows) * row_bytes
    if not ranks.is_last_stage:
        said.num_sends = 1
        said.num_bytes += num_tokens * row_bytes
    return said


def models() -> dict[str, ModelConfig]:
    shipped = json.loads((SHIPPED_CHECKPOINT / "config.json").read_text(encoding="utf-8"))
    return {
        "shipped": ModelConfig.from_hf(shipped),
        "Qwen3-0.6B": QWEN3_0_6B,
        "Qwen3-32B": QWEN3_32B,
    }


def weight_bytes(config: ModelConfig) -> int:
    """What a step reads. An embedding that is not the head too is only looked up."""
    num_weights = DecoderModel(config, device="meta").num_parameters
    if not config.tie_word_embeddings:
        num_weights -= config.vocab_size * config.hidden_size
    return num_weights * ITEMSIZE


def spared_bytes(config: ModelConfig, ranks: Ranks) -> int:
    """Weights that a rank does not read, because the others do."""
    return weight_bytes(config) - weight_bytes(rank_config(config, ranks))


def row(name: str, config: ModelConfig, tp_size: int) -> dict[str, object]:
    ranks = Ranks(tp_size)
    said = step_communication(config, ranks, NUM_REQUESTS, NUM_REQUESTS, ITEMSIZE)
    num_exchanges = said.num_all_reduces + said.num_all_gathers
    spared = spared_bytes(config, ranks)
    return {
        "model, ranks": f"{name}, {tp_size}",
        "all-reduces, gathers": f"{said.num_all_reduces}, {said.num_all_gathers}",
        "handed over, MB": f"{said.num_bytes / 1e6:,.1f}",
        "weights read, MB": f"{(weight_bytes(config) - spared) / 1e6:,.0f}",
        "instead of, MB": f"{weight_bytes(config) / 1e6:,.0f}",
        "spared per exchange, MB": f"{spared / num_exchanges / 1e6:,.1f}",
    }


def table() -> str:
    return table_of([row(name, c, size) for name, c in models().items() for size in SIZES])


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description="What ranks say, against what they are spared")
    parser.add_argument("--write", action="store_true", help="into README.md")
    if parser.parse_args(arguments).write:
        write_between_markers(README, "communication", table())
    print(table())


if __name__ == "__main__":
    main(sys.argv[1:])
