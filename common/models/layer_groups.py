"""Groups of layers that share block tables: layers of one kind, up to k in each group.

    layer     0 1 2 3 4 5 | 6 7        w: attends to a window, f: to everything
    kind      w w f w w f | w w        k = 2, the layers of the rarer kind
    group     1 2 0 3 1 0 | 2 3        dealt out in turn
    tensor    0 0 0 0 1 1 | 1 1        of the KV cache

Page i of a group lies in tensors 0 to k - 1, so a block has the same bytes for all groups, and all
draw from one pool. If the number of layers of a kind is not a multiple of k, some groups leave the
last tensors unused; k is chosen to keep that small. A pipeline stage has the same groups, with a
tensor for each of a group's layers on that stage, so a block's size depends on the stage.

vLLM's hybrid KV cache manager deals layers in the same way.

See common/README.md#which-models"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Window = int | None  # tokens that a query sees, itself included; None: all before it


@dataclass(frozen=True, slots=True)
class LayerGroups:
    windows: tuple[Window, ...]  # one for each group
    places: tuple[tuple[int, int], ...]  # for each layer: its group, and its tensor of the cache
    num_tensors: int  # in the cache, for keys, and as many for values

    def of_stage(self, layers: range) -> LayerGroups:
        """The groups restricted to `layers`."""
        counts = [0] * len(self.windows)
        places = []
        for group, _ in self.places[layers.start : layers.stop]:
            places.append((group, counts[group]))
            counts[group] += 1
        return LayerGroups(self.windows, tuple(places), max(counts))

    @property
    def have_windows(self) -> bool:
        return any(window is not None for window in self.windows)


def deal_layers(windows: Sequence[Window], max_model_len: int) -> LayerGroups:
    """Deal the layers to groups. `windows` has each layer's window. A window that hides no position
    of `max_model_len` tokens counts as None."""
    kinds: dict[Window, list[int]] = {}
    for layer, window in enumerate(windows):
        hides = window is not None and window < max_model_len
        kinds.setdefault(window if hides else None, []).append(layer)
    counts = [len(layers) for layers in kinds.values()]
    size = min(min(counts), max(counts), key=lambda k: sum(-count % k for count in counts))
    of_groups: list[Window] = []
    places: dict[int, tuple[int, int]] = {}
    for window in sorted(kinds, key=lambda w: (w is not None, w or 0)):  # all before it: the first
        layers = kinds[window]
        num_groups = -(-len(layers) // size)
        for turn, layer in enumerate(layers):
            places[layer] = len(of_groups) + turn % num_groups, turn // num_groups
        of_groups += [window] * num_groups
    return LayerGroups(tuple(of_groups), tuple(places[i] for i in range(len(windows))), size)
