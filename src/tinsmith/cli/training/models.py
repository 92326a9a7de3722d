"""Which model a command is to use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinsmith.cli.failures import CommandError

if TYPE_CHECKING:
    from tinsmith.client.service import ServiceClient


def known_model(service: ServiceClient, name: str | None) -> str:
    """The model of that name, or the only one; asked before its tokenizer is looked for."""
    known = [
        each.model_name
        for each in service.get_server_capabilities().supported_models
        if each.trainable is not False and each.model_name
    ]
    if name is None and len(known) == 1:
        return known[0]
    if name is None:
        raise CommandError("Say which model to train: --model", f"Known: {', '.join(known)}")
    if name not in known:
        raise CommandError(
            f"The server cannot train a model called {name!r}", f"Known: {', '.join(known)}"
        )
    return name
