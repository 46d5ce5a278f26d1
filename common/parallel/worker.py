"""A worker process: computes one rank's part of the model and executes the driver's plans.

    python -m common.parallel.worker FOLDER RANK LIFELINE     the sockets' folder; a pipe, by number

It never sees the user's script. It reads one message after another, and answers in order; it enters
a collective because a plan says so, so between two plans it can wait forever. When the driver
closes its end of the pipe or exits, the worker ends too, even in the middle of a step: a thread
watches the lifeline.

The worker uses the engine's runner: a `PagedModelRunner`, inside a `SpeculatingRunner` if draft
tokens are proposed. All ranks of a stage sample the same tokens from the same logits, and propose
the same draft tokens. How many to propose depends on measured time, so the plan has the number.

See common/parallel/README.md#processes"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import threading
import traceback

from common.parallel.channel import WorkerChannel

logger = logging.getLogger(__name__)


def end_with_driver(lifeline: int, driver: int) -> None:
    """End this process when the pipe closes. If a fork of the driver holds the pipe, end when
    `driver` is no longer the parent."""
    while os.getppid() == driver and not select.select([lifeline], [], [], 1.0)[0]:
        pass
    os._exit(1)  # no process will read the result


def serve(channel: WorkerChannel) -> None:
    """Process messages until the driver sends `close`. An error is reported."""
    try:
        from common.parallel.worker_rank import Rank  # all heavy imports

        rank = Rank.start(channel)
        while rank.handle(channel.receive()):
            pass
    except BaseException as error:
        from common.parallel.message import pack_error

        logger.error("%s", "".join(traceback.format_exception(error)))
        channel.send(pack_error(error))
        threading.Event().wait()  # the driver ends this process


def main(argv: list[str]) -> None:
    folder, rank, lifeline = argv
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver to answer
    watch = (int(lifeline), os.getppid())
    threading.Thread(target=end_with_driver, args=watch, name="lifeline", daemon=True).start()
    serve(WorkerChannel(folder, int(rank)))
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # without PyTorch's shutdown


if __name__ == "__main__":
    main(sys.argv[1:])
