"""A model that answers by a script, through the real engine: each token has one successor.

Attention and MLP add nothing, so the logits depend on the last token alone. Whole sentences are
tokens; a chat template ends the prompt with the token that begins the answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from tests.support import byte_tokenizer, tiny_llama

BEGIN, AFTER_TOOL = "<begin>", "<after>"
"""What the prompt ends with: usually, and when the last message is a tool's result."""

TEMPLATE = (
    "{% if tools %}<tool_call>{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content[:40] }}\n{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<after>' if messages[-1].role == 'tool' else '<begin>' }}{% endif %}"
)

_HIDDEN = 512


def call(name: str, arguments: Mapping[str, object]) -> str:
    """The text of a call, as the template's family writes it."""
    said = json.dumps({"name": name, "arguments": dict(arguments)})
    return f"<tool_call>{said}</tool_call>"


def write(folder: Path, *, first: str, after_tool: str) -> Path:
    """A model that says `first`, and `after_tool` once it has been told a tool's result."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoTokenizer

    byte_tokenizer.save(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([BEGIN, AFTER_TOOL, first, after_tool])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    end, begin, after, *answers = tokenizer.convert_tokens_to_ids(
        ["<end>", BEGIN, AFTER_TOOL, first, after_tool]
    )
    tiny_llama.save(
        folder,
        seed=0,
        vocab_size=len(tokenizer),
        hidden_size=_HIDDEN,
        max_position_embeddings=4096,
        eos_token_id=end,
        bos_token_id=None,
    )
    file = folder / "model.safetensors"
    weights = {
        name: torch.ones_like(tensor) if tensor.ndim == 1 else torch.zeros_like(tensor)
        for name, tensor in load_file(file).items()
    }
    # Each token has a direction of its own, and its successor listens to it.
    weights["model.embed_tokens.weight"] = torch.eye(len(tokenizer), _HIDDEN)
    weights["lm_head.weight"][end] = 1.0
    for token, answer in zip((begin, after), answers, strict=True):
        weights["lm_head.weight"][answer, token] = 10.0
    save_file(weights, file, {"format": "pt"})
    return folder
