"""Keeps the garbage collector from scanning what stays: modules, base models and the like.

These are nearly all objects of the process. Scanning them takes a tenth of a second, during which
nothing is trained or sampled.
"""

from __future__ import annotations

import gc
import sys


class Garbage:
    def __init__(self) -> None:
        self._num_modules = 0

    def settle(self) -> None:
        """Call it when there is nothing to do. It has an effect only after modules were loaded, as
        with a first model."""
        if len(sys.modules) == self._num_modules:
            return
        gc.collect()
        gc.freeze()
        self._num_modules = len(sys.modules)
