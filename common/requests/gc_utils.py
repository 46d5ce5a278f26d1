"""Python's collector, for a program that serves or measures. It is the program's to set: a library
that froze what it found would keep somebody's memory for ever."""

import atexit
import gc

# New objects between two looks for cycles among them (10 ms, in which nobody else runs), and such
# looks between two among those that have stayed.
GC_THRESHOLDS = 10_000, 50


def freeze_gc_heap() -> None:
    """Exclude everything that exists now from garbage collection, and collect less often. Call it
    after `common.engine` was imported and before an engine is made: imported modules stay, so the
    collector need not go through them again and again. And a step next to never makes a cycle: a
    collection after every 700 objects finds nothing, and now and then goes through all there are,
    in the middle of a step."""
    if gc.get_freeze_count() == 0:
        import transformers.models.auto.tokenization_auto  # noqa: F401  most of what there is

        gc.collect()
        gc.freeze()
        if 0 < gc.get_threshold()[0] < GC_THRESHOLDS[0]:
            gc.set_threshold(*GC_THRESHOLDS)
        atexit.register(gc.unfreeze)
