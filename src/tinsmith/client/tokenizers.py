"""Which tokenizer belongs to a model, and loading it: once per process, without torch.

The server's own comes first. A hub is asked only where the service hands none out.

Tokenizers encode text as it is. No chat template is applied unless the caller does so with the
tokenizer's own `apply_chat_template`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinsmith.client.downloads.tokenizer import fetch_tokenizer
from tinsmith.errors import TinkerError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tinsmith.client.uplink.uplink import Uplink

LLAMA_3_TOKENIZER = "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer"
"""The Llama 3 tokenizer, from a place that asks for no licence agreement."""


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    name: str
    """A hub name or a folder."""
    revision: str | None = None
    """Set where the tokenizer is code from the hub: only this revision of it is run."""


_PINNED = {
    "moonshotai/Kimi-K2-Thinking": "612681931a8c906ddb349f8ad0f582cb552189cd",
    "moonshotai/Kimi-K2.5": "4d01dfe0332d63057c186e0b262165819efb6611",
    "moonshotai/Kimi-K2.6": "b5aabbfb20227ed42becbf5541dbffd213942c58",
    "moonshotai/Kimi-K3": "f831ab66814297da540d832a5235f8e904f29d06",
}
_SAME_AS = {"moonshotai/Kimi-K2.5-Text-Only": "moonshotai/Kimi-K2.5"}


def choose(model_name: str, tokenizer_id: str | None = None) -> TokenizerSource:
    """What the service says, then what is known about the model's family, then the model's own
    name.

    >>> choose("meta-llama/Llama-3.1-8B").name
    'thinkingmachineslabinc/meta-llama-3-instruct-tokenizer'
    >>> choose("Qwen/Qwen3-8B/long:v2").name
    'Qwen/Qwen3-8B'
    """
    if Path(model_name).is_dir() and not tokenizer_id:
        return TokenizerSource(model_name)
    model_name = model_name.split(":")[0]
    if tokenizer_id:
        name = tokenizer_id.split(":")[0]
    elif model_name.startswith("meta-llama/Llama-3"):
        name = LLAMA_3_TOKENIZER
    elif model_name.count("/") == 2:
        name = model_name.rpartition("/")[0]
    else:
        name = model_name
    name = _SAME_AS.get(name, name)
    return TokenizerSource(name, _PINNED.get(name))


def of_model(
    uplink: Uplink, base_model: str, tokenizer_id: str | None = None
) -> PreTrainedTokenizerBase:
    """The tokenizer of a model that a service serves."""
    folder = uplink.submit(fetch_tokenizer, uplink.api, base_model).result()
    return load(base_model, tokenizer_id) if folder is None else load(str(folder))


def load(model_name: str, tokenizer_id: str | None = None) -> PreTrainedTokenizerBase:
    return _load(choose(model_name, tokenizer_id))


@lru_cache(maxsize=32)
def _load(source: TokenizerSource) -> Any:  # transformers is not imported to be named here
    if source.name.startswith(("TML/", "thinkingmachines/")):
        return _thinking_machines(source.name)
    try:
        from transformers import PreTrainedTokenizerFast
    except ImportError as error:
        raise TinkerError(
            "get_tokenizer needs the transformers package: pip install transformers"
        ) from error
    if source.revision is None:
        try:
            # AutoTokenizer would import torch; a tokenizer.json needs none of that.
            return PreTrainedTokenizerFast.from_pretrained(source.name)
        except (OSError, ValueError, TypeError, AttributeError):
            pass  # no tokenizer.json, or one that needs a class of its own
    from transformers import AutoTokenizer

    options = (
        {} if source.revision is None else {"trust_remote_code": True, "revision": source.revision}
    )
    return AutoTokenizer.from_pretrained(source.name, **options)


def _thinking_machines(name: str) -> Any:
    try:
        from tml_tokenizers.tinker_tokenizers import (  # type: ignore[import-not-found]  # optional
            get_tinker_tokenizer,
        )
    except ImportError as error:
        raise TinkerError(
            f"the tokenizer {name!r} comes in a package of its own, tml-tokenizers, which is not "
            "installed; or build prompts with the tml-renderers package"
        ) from error
    tokenizer = get_tinker_tokenizer(name)
    if tokenizer is None:
        raise TinkerError(f"tml-tokenizers has no tokenizer {name!r}")
    return tokenizer
