"""Python's collector, for a program that serves or measures. It is the program's to set: a library
that froze what it found would keep somebody's memory for ever."""

import atexit
import gc

# New objects between two looks for cycles among them (10 ms, in which nobody else runs), and such
# looks between two among those that have stayed.
GC_THRESHOLDS = 10_000, 50


def spare_what_is_loaded() -> None:
    """Called after the imports, and before an engine is made: what was imported stays, so the
    collector need not go through all of it again and again. And what a step makes is next to never
    in a cycle: looking after every 700 objects finds nothing, and now and then goes through all
    there are, in the middle of a step."""
    if gc.get_freeze_count() == 0:
        import transformers.models.auto.tokenization_auto  # noqa: F401  most of what there is

        import common.engine  # noqa: F401

        gc.collect()
        gc.freeze()
        if 0 < gc.get_threshold()[0] < GC_THRESHOLDS[0]:
            gc.set_threshold(*GC_THRESHOLDS)
        atexit.register(gc.unfreeze)
