"""The tokenizer for a model that a command renders text for.

That of transformers, where it is installed; otherwise one that knows `tokenizer.json` and the chat
template beside it, which is all that `tinsmith[cli]` needs for `sample` and `chat`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinsmith.errors import TinkerError
from tinsmith.text_model import TextModel

if TYPE_CHECKING:
    from tinsmith.client.service import ServiceClient


def load_tokenizer(service: ServiceClient, base_model: str, given: str | None = None) -> Any:
    """The server's, unless the user gave a folder or a hub name."""
    from tinsmith.client import tokenizers
    from tinsmith.client.downloads.tokenizer import fetch_tokenizer

    try:
        if importlib.util.find_spec("transformers") is None:
            holder = service.holder
            folder = (
                holder.submit(fetch_tokenizer, holder.api, base_model).result()
                if given is None
                else Path(given)
            )
            return PlainTokenizer(base_model, folder)
        if given is not None:
            return tokenizers.load(given)
        return tokenizers.of_model(service.holder, base_model)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise TinkerError(
            f"no tokenizer for {base_model!r} ({reason}); "
            "give a folder or a hub name with --tokenizer"
        ) from error


class PlainTokenizer:
    """What commands use of a transformers tokenizer."""

    def __init__(self, name: str, folder: Path | None) -> None:
        if folder is None or not (folder / "tokenizer.json").is_file():
            raise ValueError("no tokenizer.json; other kinds need the package transformers")
        self._model = TextModel(name, folder)
        self.eos_token_id = self._model.special_token("eos_token")
        self.bos_token_id = self._model.special_token("bos_token")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._model.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        assert skip_special_tokens, "no command shows them"
        return self._model.decode(tokens)

    def apply_chat_template(
        self, messages: Sequence[dict[str, Any]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert not tokenize, "commands encode the text themselves"
        return self._model.render(messages, is_open=add_generation_prompt)
