"""Whether our decoder computes what `transformers` computes from the same files.

Settings in `config.json` have many spellings, and reading one of them differently gives a model
that talks and is wrong. So before a model is served, a small one is cut from it (one layer of each
kind, a few experts, the first rows of the vocabulary, the settings as they stand), both libraries
load that from disk, and their logits are compared, at short and at the longest positions, beyond
the attention's windows, which are made small. It takes
memory for those few layers, in float32 on the CPU. The outcome is kept in the cache folder while
the model's files, our code and `transformers` stay the same.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import re
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch

from tinsmith.engine.local.model.batch import PackedAttention
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.families import DecoderConfig, ExpertsSpec
from tinsmith.engine.local.model.family_settings import BY_LAYER_TYPES, NEVER_SLIDING
from tinsmith.engine.local.model.foreign.building import transformers_config
from tinsmith.engine.local.model.lora import AdapterSegments
from tinsmith.engine.local.model.model_types import Path as RunsOn
from tinsmith.engine.local.model.settings import (
    IN_PARTS,
    as_transformers_knows,
    read_config,
    read_settings,
)
from tinsmith.engine.local.model.sources import quiet_transformers
from tinsmith.engine.stored_tensors import Entry, encode_header, stored_tensors, weight_files
from tinsmith.errors import EngineError

logger = logging.getLogger(__name__)

TOLERANCE = 3e-5
"""Largest difference between logits, relative to the largest; rounding gives about 1e-6."""

_MAX_ROWS = 512
"""Rows of the vocabulary that are compared."""

_MAX_EXPERTS = 8
"""Experts of a layer that are compared, or as many as a token goes to."""

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_HEAD = "lm_head.weight"
_NUM_TOKENS = 24
_LAYER = re.compile(r"layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_OF_ALL_EXPERTS = re.compile(
    r"\.experts\.(gate_up|down)_proj(_bias)?$|\.gate\.(weight|e_score_correction_bias)$"
    r"|\.router\.(weight|bias)$"
)
"""What has a row, or a matrix, for each expert."""


def verify(folder: Path, config: DecoderConfig, cache_folder: Path) -> None:
    """Raise an error that says by how much, unless both give the same logits."""

    def compared() -> float:
        Decoder.load(folder, "meta")  # is anything missing, or of another shape, in any layer?
        return compare(folder, config)

    difference = remembered(folder, cache_folder, "decoder", compared)
    if difference is not None and not difference <= TOLERANCE:
        raise EngineError(
            f"the logits of {config.architecture} differ from transformers' by {difference:.2g} of "
            f"their size (limit {TOLERANCE:g}): a setting in its config.json is read differently. "
            "Please report it; verify_models = false serves the model all the same"
        )


def remembered(
    folder: Path, cache_folder: Path, runs_on: RunsOn, compare: Callable[[], float | None]
) -> float | None:
    """What a comparison found, now or before, of the same settings, shapes and code."""
    record = cache_folder / "verified" / f"{_digest(folder, runs_on)}.json"
    if record.exists():
        known: float | None = json.loads(record.read_text("utf-8"))["difference"]
        return known
    difference = compare()
    logger.info("%s: logits differ from transformers' by %s", folder.name, difference)
    record.parent.mkdir(parents=True, exist_ok=True)
    temporary = record.with_suffix(f".{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}")
    temporary.write_text(json.dumps({"difference": difference}) + "\n", "utf-8")
    temporary.replace(record)
    return difference


def compare(folder: Path, config: DecoderConfig) -> float:
    """The largest difference between the logits, relative to the largest logit."""
    _compare_kinds(folder, config)
    # One layer of each kind of attention and MLP, the first of its kind.
    experts = config.experts
    kinds = [
        (
            None if layer in config.recurring else config.layers[config.place(layer)],
            experts is not None and layer in experts.layers,
        )
        for layer in range(config.num_blocks)
    ]
    layers = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    with tempfile.TemporaryDirectory() as name:
        small = Path(name)
        num_rows = min(config.vocab_size, _MAX_ROWS)
        _cut(folder, small, config, layers, num_rows)
        decoder = Decoder.load(small)
        half = min(_NUM_TOKENS, config.max_context_length) // 2
        far = config.max_context_length - half
        positions = torch.cat([torch.arange(half), torch.arange(far, far + half)])
        tokens = torch.arange(len(positions)) * 7 % num_rows
        expected = _reference_logits(small, tokens, positions)
        segments = AdapterSegments.whole(len(tokens))
        attention = PackedAttention(decoder.config, [len(tokens)])
        with torch.no_grad():
            hidden = decoder.hidden(tokens, positions, attention, segments)
            logits = decoder.unembed(hidden, segments)
    return float((logits - expected).abs().max() / expected.abs().max())


def _compare_kinds(folder: Path, config: DecoderConfig) -> None:
    """What the small model cannot show: which layers slide, and how far each sees."""
    theirs = transformers_config(folder).get_text_config()
    family = theirs.model_type.replace("ministral", "mistral")
    kinds = getattr(theirs, "layer_types", None) if family in BY_LAYER_TYPES else None
    window = None if family in NEVER_SLIDING else getattr(theirs, "sliding_window", None)
    if kinds is None:
        kinds = ["sliding_attention" if window else "full_attention"] * theirs.num_hidden_layers
    expected = [window if kind == "sliding_attention" else None for kind in kinds]
    if (found := _windows(config)) != expected:
        raise EngineError(
            f"transformers reads the attention windows of its layers as {expected}, we as {found}"
        )
    recurring = [layer for layer, kind in enumerate(kinds) if kind == "linear_attention"]
    if list(config.recurring) != recurring:
        raise EngineError(
            f"transformers takes the layers {recurring} for recurrent ones, we {config.recurring}"
        )


def _windows(config: DecoderConfig) -> list[int | None]:
    """Of all layers; recurrent ones have none."""
    return [
        None if layer in config.recurring else config.layers[config.place(layer)].window
        for layer in range(config.num_blocks)
    ]


def _reference_logits(folder: Path, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
            trust_remote_code=False,
        ).eval()
    with torch.no_grad():
        output = model(
            input_ids=tokens[None],
            position_ids=positions[None],
            # Without a mask a gap between positions would be taken for the start of a sequence.
            attention_mask=torch.ones(1, len(tokens), dtype=torch.int64),
            use_cache=False,
        )
    logits: torch.Tensor = output.logits[0].float()
    return logits


def _cut(
    folder: Path, target: Path, config: DecoderConfig, layers: list[int], num_rows: int
) -> None:
    """Write a model of some layers, experts and rows of the one in `folder`."""
    whole = read_settings(folder / "config.json")
    is_part = whole.get("model_type") in IN_PARTS
    settings = as_transformers_knows(whole)
    text = settings["text_config"] if isinstance(settings.get("text_config"), dict) else settings
    text["num_hidden_layers"] = len(layers)
    text["vocab_size"] = num_rows
    if text is not settings or is_part:
        text["tie_word_embeddings"] = config.is_tied  # may be said of the whole model alone
    windows = [spec.window for spec in config.layers if spec.window is not None]
    if windows or text.get("sliding_window"):
        # Of a large one nothing would be seen.
        text["sliding_window"] = min([_NUM_TOKENS // 3, *windows])
    if text.get("layer_types") is not None:
        text["layer_types"] = [text["layer_types"][layer] for layer in layers]
    elif len(layers) > 1 or config.recurring:
        kinds = _kinds(folder)
        text["layer_types"] = [kinds[layer] for layer in layers]
    num_experts = 0
    if (experts := config.experts) is not None:
        num_experts = _fewer_experts(experts)
        text |= {name: num_experts for name in _NUM_EXPERTS if name in text}
        text["mlp_only_layers"] = [
            number for number, layer in enumerate(layers) if layer not in experts.layers
        ]
        text["decoder_sparse_step"] = 1
        text["first_k_dense_replace"] = len(text["mlp_only_layers"])
    for part in (settings, text):
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            if name in part:
                part[name] = 0
    if isinstance(settings.get("vision_config"), dict):
        settings["vision_config"]["num_hidden_layers"] = 1  # it is made, and not asked
    (target / "config.json").write_text(json.dumps(settings), "utf-8")
    _cut_weights(
        folder, target / "model.safetensors", layers, num_rows, num_experts, is_part=is_part
    )


def _fewer_experts(experts: ExpertsSpec) -> int:
    """As many as a token goes to at least; where they are in groups, as many in each."""
    least = max(experts.per_token, _MAX_EXPERTS)
    if (groups := experts.groups) is not None:
        size = max(2, -(-experts.per_token // groups.per_token), -(-least // groups.count))
        least = size * groups.count
    return min(experts.num_experts, least)


def _kinds(folder: Path) -> list[str]:
    config = read_config(folder)
    return [
        "linear_attention"
        if layer in config.recurring
        else "full_attention"
        if window is None
        else "sliding_attention"
        for layer, window in enumerate(_windows(config))
    ]


def _cut_weights(
    folder: Path,
    target: Path,
    layers: list[int],
    num_rows: int,
    num_experts: int,
    *,
    is_part: bool,
) -> None:
    """With `is_part`, under the names that the language part has alone."""
    stored = stored_tensors(weight_files(folder))
    ending = "embed_tokens.weight"
    prefix = next(name for name in stored if name.endswith(ending)).removesuffix(ending)
    kept: dict[str, tuple[str, int | None]] = {}
    """From the new name to the old one, and how many of its rows."""
    for name in stored:
        if name.endswith((_HEAD, prefix + ending)):
            kept[name] = (name, num_rows)
        elif name.startswith(prefix):
            layer = _LAYER.match(name.removeprefix(prefix))
            if layer is None:
                kept[name] = (name, None)
            elif int(layer[1]) in layers and not _is_beyond(name, num_experts):
                number = layers.index(int(layer[1]))
                rows = num_experts if num_experts and _OF_ALL_EXPERTS.search(name) else None
                kept[name.replace(layer[0], f"layers.{number}.", 1)] = (name, rows)
    if is_part:
        kept = {
            _HEAD if _HEAD in new else f"model.{new.removeprefix(prefix)}": kept[new]
            for new in kept
        }
    entries = {}
    for new, (old, rows) in kept.items():
        dtype, shape, num_bytes = stored[old].entry
        if rows is not None:
            num_bytes, shape = num_bytes // shape[0] * rows, [rows, *shape[1:]]
        entries[new] = Entry(dtype, shape, num_bytes)
    with target.open("wb") as file:
        file.write(encode_header(entries, {"format": "pt"}))
        for old, rows in kept.values():
            file.write(stored[old].read_bytes(rows))


def _is_beyond(name: str, num_experts: int) -> bool:
    """Whether this is of an expert that is left out."""
    expert = _EXPERT.search(name)
    return expert is not None and int(expert[1]) >= num_experts


def _digest(folder: Path, runs_on: RunsOn) -> str:
    """Of what the outcome depends on: settings, names and shapes of the weights, and both codes."""
    digest = hashlib.sha256(f"{runs_on} {version('transformers')} {code_digest()}".encode())
    for path in sorted(folder.glob("*config.json")):
        digest.update(path.name.encode() + path.read_bytes())
    for name, tensor in sorted(stored_tensors(weight_files(folder)).items()):
        digest.update(repr((name, tensor.entry)).encode())
    return digest.hexdigest()


@functools.cache
def code_digest() -> str:
    """Of the modules that read and run a model, which are all beside this folder."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
