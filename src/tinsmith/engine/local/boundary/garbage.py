"""Keeps the collector of garbage off what stays: modules, base models and their kind.

These are nearly all objects of the process. To look through them takes a tenth of a second, and
whoever trains or samples at that moment waits for it.
"""

from __future__ import annotations

import gc
import sys


class Garbage:
    def __init__(self) -> None:
        self._num_modules = 0

    def settle(self) -> None:
        """To be called when there is nothing to do; does something only after modules were loaded,
        as with a first model."""
        if len(sys.modules) == self._num_modules:
            return
        gc.collect()
        gc.freeze()
        self._num_modules = len(sys.modules)
