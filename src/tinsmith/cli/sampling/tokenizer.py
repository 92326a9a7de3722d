"""The tokenizer for a model that a command renders text for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tinsmith.errors import TinkerError

if TYPE_CHECKING:
    from tinsmith.client.service import ServiceClient


def load_tokenizer(service: ServiceClient, base_model: str, given: str | None = None) -> Any:
    """The server's, unless the user gave a folder or a hub name."""
    from tinsmith.client import tokenizers

    try:
        if given is not None:
            return tokenizers.load(given)
        return tokenizers.of_model(service.holder, base_model)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise TinkerError(
            f"no tokenizer for {base_model!r} ({reason}); "
            "give a folder or a hub name with --tokenizer"
        ) from error
