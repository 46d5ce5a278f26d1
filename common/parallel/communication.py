"""What a rank says in a step, by formula. The tests hold it against what `Collectives` counted.

    embedding   one all-reduce of [num_tokens, hidden_size]               the first stage
    a layer     two all-reduces: after o, after down                      each stage, of its layers
    head        one all-gather of [num_logit_rows, vocab_size / ranks]    the last stage
    a border    one send of [num_tokens, hidden_size]                     all stages but the last

In the last layer of all, only the rows that need logits go on after attention."""

from __future__ import annotations

from common.model_config import ModelConfig
from common.parallel.collectives import Communication
from common.parallel.ranks import Ranks
from common.parallel.sharded_layers import rows_per_rank


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
