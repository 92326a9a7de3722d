"""The tokenizer for a model that a command renders text for.

The embedded model's tokenizer lies beside its weights on this machine, so that it needs no hub;
others are found by the SDK's own rules.
"""

from __future__ import annotations

from typing import Any

from tinsmith.errors import TinkerError


def load_tokenizer(base_model: str, given: str | None = None) -> Any:
    """`given` is a folder or a hub name that the user prefers."""
    from tinsmith.client import tokenizers
    from tinsmith.engine.local.config import EMBEDDED_MODEL

    source = given or base_model
    if source == EMBEDDED_MODEL:
        source = _embedded_folder()
    try:
        return tokenizers.load(source)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise TinkerError(
            f"no tokenizer for {base_model!r} ({reason}); "
            "give a folder or a hub name with --tokenizer"
        ) from error


def _embedded_folder() -> str:
    from tinsmith.engine.local.config import EMBEDDED_SOURCE, LocalEngineConfig
    from tinsmith.engine.local.model.sources import model_folder

    return str(model_folder(EMBEDDED_SOURCE, LocalEngineConfig()))
