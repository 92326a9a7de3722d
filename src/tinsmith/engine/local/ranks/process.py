"""The process of a rank other than the first: `python -m tinsmith.engine.local.ranks.process FD`.

FD is a socket to the first rank, which says what to do (`lockstep`). The process ends when that
socket closes, as it does when the first rank dies.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import logging
import math
import signal
import socket
import sys

from tinsmith.engine.local import progress
from tinsmith.engine.local.boundary.process import be_first_to_go
from tinsmith.engine.local.core import EngineCore
from tinsmith.engine.local.ranks import lockstep
from tinsmith.engine.local.ranks.group import JoinedRanks
from tinsmith.engine.local.ranks.link import Begin, Link, end


def main(fd: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    be_first_to_go()
    logging.basicConfig(level=logging.INFO, format=progress.LOG_FORMAT)
    folder = None
    link = Link([socket.socket(fileno=fd)], lambda _: end(folder, status=0))
    begin: Begin = link.hear()
    folder = begin.folder
    try:
        _follow(begin, link)
    except Exception:
        # At once: the others wait, and threads of this process need not come to an end.
        logging.getLogger(__name__).exception("rank %d failed", begin.rank)
        end(folder, status=1)


def _follow(begin: Begin, link: Link) -> None:
    ranks = JoinedRanks(begin.rank, begin.num_ranks, link)
    # How long an uploaded loss may take is for the first rank to say.
    config = dataclasses.replace(begin.config, custom_loss_seconds=math.inf)
    lockstep.choose_device(config, ranks)
    core = EngineCore(config, ranks)
    ranks.join(begin.folder, core.device)
    lockstep.follow(core, link)


if __name__ == "__main__":
    main(int(sys.argv[1]))
