"""A process's rank in an engine, and the layers that this rank computes.

    tensor_parallel_size=2, pipeline_parallel_size=2

                 tp_rank 0   tp_rank 1
    stage 0       rank 0      rank 1      the lower layers, and the embedding
    stage 1       rank 2      rank 3      the upper layers, norm and head

The ranks of a stage compute the same layers, each a part of every matrix. A rank's neighbours in
other stages are those with its `tp_rank`.

See common/parallel/README.md#tensor-parallel"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ranks:
    """A rank and the parallel sizes."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    rank: int = 0  # stage * tensor_parallel_size + tp_rank

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tensor_parallel_size

    @property
    def stage(self) -> int:
        return self.rank // self.tensor_parallel_size

    @property
    def is_first_stage(self) -> bool:
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.pipeline_parallel_size - 1

    @property
    def is_output_rank(self) -> bool:
        """Whether sampled tokens are read from this rank. All ranks of its stage have the same."""
        return self.is_last_stage and self.tp_rank == 0

    def layers(self, num_layers: int) -> range:
        """The layers of this rank's stage. The remainder of an even division goes to stages in the
        middle, then to the first: the last one also computes the head, and the first holds the
        embedding. Raises `ValueError` if a stage would have no layer."""
        num_stages = self.pipeline_parallel_size
        if num_layers < num_stages:
            raise ValueError(
                f"pipeline_parallel_size must be <= {num_layers}, the number of layers, got "
                f"{num_stages}"
            )
        even, remainder = divmod(num_layers, num_stages)
        taken = [*range(1, num_stages - 1), 0][:remainder]
        sizes = [even + (stage in taken) for stage in range(num_stages)]
        start = sum(sizes[: self.stage])
        return range(start, start + sizes[self.stage])
