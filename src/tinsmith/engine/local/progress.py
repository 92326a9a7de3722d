"""Progress of what is done before a model can be served: fetching and converting.

The engine's process logs each stage to a logger of its own; the process's caller, who reads its
output, hands it on to the logger of the same name. `tinsmith serve` shows that at every log level.
"""

from __future__ import annotations

import logging

LOGGER = logging.getLogger("tinsmith.progress")

LOG_FORMAT = "%(levelname)s %(name)s: %(message)s"
"""Format of the lines that the process writes."""

_BEGINNING = f"INFO {LOGGER.name}: "


def tell(what: str, fraction: float) -> None:
    """`what` is being done; `fraction` of the whole is done already."""
    LOGGER.info("%s (%.0f%%)", what, 100 * fraction)


def hand_on(line: str) -> bool:
    """Log a line of the process if it reports progress; whether it does."""
    if not line.startswith(_BEGINNING):
        return False
    LOGGER.info("%s", line.removeprefix(_BEGINNING))
    return True
