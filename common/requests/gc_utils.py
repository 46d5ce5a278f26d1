"""Python's garbage collector, for a program that serves or measures. The program should configure
it: a library that froze the heap would keep other code's memory forever.

See common/README.md"""

import atexit
import gc

# New objects between two collections of the young generation (10 ms each, in which no other thread
# runs), and such collections between two of the next generation.
GC_THRESHOLDS = 10_000, 50


def freeze_gc_heap() -> None:
    """Exclude all existing objects from garbage collection, and collect less often. Call it after
    `common.engine` is imported and before an engine is made: imported modules stay, so collections
    need not traverse them again. A step almost never creates a cycle, so a collection after every
    700 objects finds nothing, and occasionally one traverses all objects in the middle of a step.
    """
    if gc.get_freeze_count() == 0:
        import transformers.models.auto.tokenization_auto  # noqa: F401  most of the objects

        gc.collect()
        gc.freeze()
        if 0 < gc.get_threshold()[0] < GC_THRESHOLDS[0]:
            gc.set_threshold(*GC_THRESHOLDS)
        atexit.register(gc.unfreeze)
