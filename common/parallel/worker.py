"""A worker: a process that has one rank of the model and executes the driver's plans.

    python -m common.parallel.worker CHANNEL LIFELINE     two inherited sockets, by number

It never sees the user's script. It reads one message after another, and answers in order; it enters
a collective because a plan says so, so between two plans it can wait forever. When the driver
closes its end or exits, the worker ends too, even in the middle of a step: a thread watches the
lifeline.

The worker uses the engine's runner: a `PagedModelRunner`, inside a `SpeculatingRunner` if draft
tokens are proposed. All ranks of a stage sample the same tokens from the same logits, and propose
the same draft tokens. A decision that depends on measured time gets its times from the driver.

See common/parallel/README.md#processes"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING

from common.parallel.channel import Channel, ChannelClosed, Lifeline

if TYPE_CHECKING:
    from common.parallel.worker_rank import Rank

logger = logging.getLogger(__name__)


def serve(channel: Channel, lifeline: Lifeline) -> None:
    """Process messages until the driver sends `close` or exits."""
    lifeline.start()
    try:
        from common.parallel.worker_rank import Rank  # all heavy imports

        rank = Rank.start(channel)
        while _answer(rank, channel, lifeline):
            pass
        rank.close()
    except ChannelClosed:
        pass
    except BaseException as error:
        logger.error("%s", "".join(traceback.format_exception(error)))
        _report(channel, error)
        lifeline.join()  # the driver ends this process
    finally:
        lifeline.is_over = True
        channel.close()


def _answer(rank: Rank, channel: Channel, lifeline: Lifeline) -> bool:
    data = channel.receive()
    lifeline.step = rank.num_plans
    is_over = rank.handle(data)
    lifeline.step = None
    lifeline.is_over |= is_over
    return not is_over


def _report(channel: Channel, error: BaseException) -> None:
    from common.parallel.message import pack_error

    with suppress(ChannelClosed):
        channel.send(pack_error(error))


def main(argv: list[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver to answer
    channel, lifeline = (socket.socket(fileno=int(number)) for number in argv)
    serve(Channel(channel), Lifeline(lifeline, parent=os.getppid()))
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # without PyTorch's shutdown


if __name__ == "__main__":
    main(sys.argv[1:])
