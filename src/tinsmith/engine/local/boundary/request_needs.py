"""What a request is about: its adapters, base models and folders, and how many tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tinsmith.engine.base import Pass
from tinsmith.engine.calls import CALLS
from tinsmith.engine.local.boundary.core import Core
from tinsmith.engine.local.boundary.messages import Request


def adapters_of(request: Request) -> frozenset[str]:
    """The adapters that a request trains, changes or reads."""
    if request.method in ("run_passes", "step"):
        (items,) = request.arguments
        return frozenset(item.adapter_id for item in items)
    adapter_id = CALLS[request.method].argument("adapter_id", request.arguments)
    return frozenset() if adapter_id is None else frozenset([adapter_id])


def base_models_of(request: Request, core: Core) -> frozenset[str]:
    """The base models that have to be in memory for it."""
    if request.method == "sample":
        return frozenset([request.arguments[0].base_model])
    if request.method == "create_adapter":
        return frozenset([CALLS["create_adapter"].argument("base_model", request.arguments)])
    if request.method == "run_passes":
        found = map(core.base_model_of, adapters_of(request))
        return frozenset(name for name in found if name is not None)
    return frozenset()


def folders_of(request: Request) -> frozenset[Path]:
    """Where the files are that it reads or writes."""
    call = CALLS[request.method]
    named = (call.argument(name, request.arguments) for name in ("folder", "source"))
    return frozenset(folder for folder in named if folder is not None)


def num_targets(passes: Sequence[Pass]) -> int:
    """At least as many as tokens; how many an image has is not known yet."""
    targets = (datum.loss_fn_inputs.get("target_tokens") for p in passes for datum in p.data)
    return sum(int(each.numpy.size) for each in targets if each is not None)
