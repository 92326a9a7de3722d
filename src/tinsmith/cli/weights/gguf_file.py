"""A model's folder as one GGUF file, which llama.cpp and its relatives load.

Matrices keep the type that they have in the folder, or become Q8_0 (blocks of 32 numbers of 8 bits
with a scale) or the mix of Q4_K_M (`k_quants`). Vectors are float32, as readers expect. Only what a
reader would compute the same way is written: another family, or a setting that GGUF has no word
for, is refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import (
    GGML_QUANT_VERSION,
    GGMLQuantizationType,
    GGUFWriter,
    LlamaFileType,
    RopeScalingType,
)
from gguf.quants import quant_shape_to_byte_shape, quantize

from tinsmith.cli.progress import Tell
from tinsmith.cli.weights import gguf_tokenizer, k_quants
from tinsmith.engine.local.model.families import DecoderConfig
from tinsmith.engine.local.model.rope import Rope
from tinsmith.engine.local.model.settings import read_config
from tinsmith.engine.stored_tensors import Array, Stored, stored_tensors, weight_files
from tinsmith.errors import ValidationError

FAMILIES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""From the family's name in `config.json` to the one in the file."""

_TYPES = {
    "F32": ("<f4", GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
    "F16": ("<f2", GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "BF16": ("<u2", GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
}

QUANTIZATIONS = {"q8_0": LlamaFileType.MOSTLY_Q8_0, "q4_k_m": LlamaFileType.MOSTLY_Q4_K_M}

_BLOCK = 32
"""Numbers of a row that share a scale."""

_OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_INNER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write(
    folder: Path, target: Path, name: str, tell: Tell, *, quantization: str | None = None
) -> None:
    """Write the model in `folder` to the file `target`; `name` is what readers call it.

    A matrix whose rows do not divide into blocks is not quantized.
    """
    family = check_family(folder)
    config = read_config(folder)
    stored_by_name = stored_tensors(weight_files(folder))
    is_tied = "lm_head.weight" not in stored_by_name

    def kind_of(name: str, shape: Sequence[int]) -> GGMLQuantizationType | None:
        if quantization is None or len(shape) == 1 or shape[-1] % _BLOCK:
            return None
        if quantization == "q8_0":
            return GGMLQuantizationType.Q8_0
        return k_quants.kind_of(name, shape[-1], config.num_layers, is_tied=is_tied)

    tensors = [
        _Tensor(given, _name(given), stored, kind_of(_name(given), stored.shape))
        for given, stored in stored_by_name.items()
    ]
    matrices = {each.stored.dtype for each in tensors if len(each.stored.shape) > 1}
    if len(matrices) != 1 or not matrices <= _TYPES.keys():
        raise ValidationError(
            f"the matrices in {folder} are {', '.join(sorted(matrices))}; "
            f"they must all have one type: {', '.join(_TYPES)}"
        )
    writer = GGUFWriter(target, family)
    try:
        writer.add_name(name)
        if quantization is not None:
            writer.add_file_type(QUANTIZATIONS[quantization])
            writer.add_quantization_version(GGML_QUANT_VERSION)
        else:
            writer.add_file_type(_TYPES[matrices.pop()][2])
        _describe(writer, config)
        gguf_tokenizer.describe(writer, folder, config.vocab_size)
        factors = _rope_factors(config)
        if factors is not None:
            writer.add_tensor_info(
                "rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes
            )
        for tensor in tensors:
            tensor.announce(writer)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if factors is not None:
            writer.write_tensor_data(factors)
        for number, tensor in enumerate(tensors, 1):
            writer.write_tensor_data(tensor.values(family, config))
            tell(number, len(tensors), tensor.name)
    finally:
        writer.close()


def check_family(folder: Path) -> str:
    """GGUF's word for the model's family; an error if there is none that we know."""
    family = json.loads((folder / "config.json").read_text("utf-8")).get("model_type")
    if family not in FAMILIES:
        raise ValidationError(
            f"models of the family {family!r} cannot be written as GGUF; "
            f"known: {', '.join(FAMILIES)}"
        )
    return FAMILIES[family]


@dataclass(frozen=True, slots=True)
class _Tensor:
    given: str
    name: str
    stored: Stored
    kind: GGMLQuantizationType | None
    """None: as it is."""

    @property
    def _is_vector(self) -> bool:
        return len(self.stored.shape) == 1

    def announce(self, writer: GGUFWriter) -> None:
        if self._is_vector:
            size = 4 * self.stored.shape[0]
            writer.add_tensor_info(self.name, self.stored.shape, np.dtype(np.float32), size)
            return
        if self.kind is not None:
            shape = quant_shape_to_byte_shape(self.stored.shape, self.kind)
            size = int(np.prod(shape))
            writer.add_tensor_info(self.name, shape, np.dtype(np.uint8), size, self.kind)
            return
        form, kind, _ = _TYPES[self.stored.dtype]
        writer.add_tensor_info(
            self.name, self.stored.shape, np.dtype(form), self.stored.num_bytes, kind
        )

    def values(self, family: str, config: DecoderConfig) -> Array:
        if self._is_vector:
            return self.stored.read()
        if self.kind is not None:
            rows = self._in_order(self.stored.read(), family, config)
            is_old = self.kind in (GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q5_0)
            made: Array = (quantize if is_old else k_quants.quantize)(rows, self.kind)
            return made
        form = _TYPES[self.stored.dtype][0]
        values = np.frombuffer(self.stored.read_bytes(), form).reshape(self.stored.shape)
        return self._in_order(values, family, config)

    def _in_order(self, values: Array, family: str, config: DecoderConfig) -> Array:
        if family == "llama" and "self_attn.q_proj" in self.given:
            return _interleaved(values, config.num_heads)
        if family == "llama" and "self_attn.k_proj" in self.given:
            return _interleaved(values, config.num_kv_heads)
        return values


def _interleaved(values: Array, num_heads: int) -> Array:
    """Rows as readers of the llama family want them: the two halves of a rotation side by side."""
    halves = values.reshape(num_heads, 2, -1, values.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def _name(given: str) -> str:
    if given in _OUTER:
        return _OUTER[given]
    found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", given)
    if found is None or found[2] not in _INNER:
        raise ValidationError(f"the model has {given!r}, which GGUF has no name for")
    return f"blk.{found[1]}.{_INNER[found[2]]}.{found[3]}"


def _describe(writer: GGUFWriter, config: DecoderConfig) -> None:
    if config.has_o_bias or config.has_mlp_bias:
        raise ValidationError("a bias on the output or MLP projections cannot be written as GGUF")
    rope = _rope(config)
    windows = [layer.window for layer in config.layers if layer.window is not None]
    writer.add_block_count(config.num_layers)
    # These readers know no sliding window, which does nothing within its own length.
    writer.add_context_length(min([config.max_context_length, *windows]))
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(rope.theta)
    if rope.kind == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope.factor)


def _rope(config: DecoderConfig) -> Rope:
    rope = config.layers[0].rope
    assert rope is not None, "these families rotate in every layer"
    if rope.kind == "yarn":
        raise ValidationError("rope scaling 'yarn' cannot be written as GGUF")
    return rope


def _rope_factors(config: DecoderConfig) -> Array | None:
    """By how much each frequency of Llama 3's scaling is slower than without it."""
    rope = _rope(config)
    if rope.kind != "llama3":
        return None
    plain = Rope(theta=rope.theta, head_dim=rope.head_dim)
    factors: Array = (plain.inverse_frequencies() / rope.inverse_frequencies()).numpy()
    return factors
