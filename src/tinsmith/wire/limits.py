"""How much a message may hold before it is refused.

A small body can name a great many objects: these limits bound the memory that decoding may take,
as a multiple of the body. They are far above what the official clients send.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    max_body_bytes: int = 256 * 1024 * 1024
    """Largest body after decompression."""

    max_control_bytes: int = 1024 * 1024
    """Largest body of a request that has no tokens, tensors or prompts in it."""

    max_metadata_bytes: int = 64 * 1024
    """Most bytes of a message's metadata, and of its tags, as JSON: they are kept for long."""

    max_metadata_entries: int = 256
    """Most entries of a message's metadata, and of its tags."""

    max_metadata_depth: int = 8
    """How deep objects and lists in metadata may lie in each other."""

    max_json_bytes: int = 24 * 1024 * 1024
    """Largest JSON body. A pass of the releases that sent passes as JSON has some 12 MB; images in
    prompts are texts of some megabytes."""

    max_json_values: int = 1_310_720
    """Most numbers and other values in a JSON body; each takes some 40 bytes while it is checked.
    The releases that sent passes as JSON cut them to 1,250,000 numbers of 4 bytes."""

    max_json_parts: int = 131_072
    """Most objects and lists in a JSON body; a pass of 1,024 datums has some 20,000."""

    max_json_texts: int = 262_144
    """Most texts in a JSON body, names of fields included."""

    max_datums: int = 16_384
    """Most datums in one request; the official clients send at most 1,024."""

    max_chunks: int = 65_536
    """Most chunks in one request, over all its datums."""

    max_loss_inputs: int = 64
    """Most named tensors of one datum."""

    max_spans: int = 65_536
    """Most provenance runs in one request, over all its datums."""

    max_config_entries: int = 256
    """Most entries of a loss configuration, and most metrics of a result."""

    max_tensor_rank: int = 8
    """Most dimensions of a tensor."""

    allows_nul: bool = True
    """Whether texts of a message may hold the character NUL, which not every database stores."""


NO_NUL = "a text holds the character NUL (U+0000), which databases cannot store; remove it"

DEFAULT_LIMITS = Limits()
