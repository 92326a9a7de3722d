"""What a request must be before anything is computed with it.

Every function returns what it was given, or nothing, or raises a `ValidationError` whose path names
the datum, the field and the position. One token outside the vocabulary, or one number that is not
finite, would otherwise spoil weights that other requests depend on. Arrays are looked at with a few
numpy reductions each; the position is searched for only once something is known to be wrong.
No torch here: these are questions about values, and any engine may ask them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tinsmith.engine.base import CustomLoss, Pass, SampleJob, Shaping
from tinsmith.engine.images import ImageRules, count_images, token_row
from tinsmith.engine.loss_table import LossSpec, loss_named
from tinsmith.errors import TooLargeError, ValidationError
from tinsmith.types import Datum, LoraConfig, ModelInput, SamplingParams, TensorData
from tinsmith.types.protocol import MAX_SAMPLES, MAX_STOP_CHARACTERS

MAX_TOPK = 1024
"""Likeliest tokens, or alternatives drawn, that may be asked for at each position."""

MAX_CELLS = 2**26
"""Likeliest tokens and alternatives that one answer may hold, of 8 bytes each."""

MAX_STOP_STRINGS = 256
"""Texts that may stop a sequence; each is looked for at every token of every sample."""

MAX_BIASES = 1024
"""Tokens whose logits a request may bias."""

MAX_TARGETS = 2**24
"""Cells of a (positions, K) matrix of targets; the answer holds a number for each."""

_FINITE_INPUTS = frozenset(
    {
        "weights",
        "logprobs",
        "advantages",
        "clip_low_threshold",
        "clip_high_threshold",
        "sequence_ratio_mask",
    }
)

Array = npt.NDArray[Any]


def check_pass(
    request: Pass, *, vocab_size: int, max_context_length: int, images: ImageRules | None = None
) -> Pass:
    """Refuse a pass that could not be computed as its sender means it.

    The answer is the pass with the number of tokens of every image.
    """
    custom = None
    spec = LossSpec()
    if request.loss_fn == "custom":
        custom = _custom_of(request)
    else:
        spec = loss_named(request.loss_fn)
        _check_config(request.loss_fn, request.loss_fn_config, spec)
    if not request.data:
        raise ValidationError("a pass needs at least one datum", "data")
    data = []
    for index, datum in enumerate(request.data):
        try:
            counted = count_images(datum.model_input, images, "model_input")
            row = token_row(counted, images)
            length = _check_row(row, "model_input", vocab_size, max_context_length)
            _check_targets(datum, length, vocab_size)
            if custom is not None:
                _check_custom_inputs(datum.loss_fn_inputs, custom)
            else:
                _check_inputs(request.loss_fn, datum.loss_fn_inputs, spec)
                _check_meaning(request.loss_fn, datum.loss_fn_inputs, spec, request.loss_fn_config)
            data.append(datum if counted is datum.model_input else _with_input(datum, counted))
        except ValidationError as error:
            raise error.under(f"data[{index}]") from None
    return replace(request, data=data)


def check_lora(lora: LoraConfig, max_rank: int) -> None:
    """Refuse an adapter that cannot be made."""
    if not 1 <= lora.rank <= max_rank:
        raise ValidationError(f"must be between 1 and {max_rank}, got {lora.rank}", "rank")
    if lora.seed is not None and not 0 <= lora.seed < 2**63:
        raise ValidationError(f"must be between 0 and 2**63 - 1, got {lora.seed}", "seed")
    if not (lora.train_attn or lora.train_mlp or lora.train_unembed):
        raise ValidationError(
            "nothing would be trained: set at least one of train_attn, train_mlp, train_unembed"
        )


def check_sample(
    job: SampleJob, *, vocab_size: int, max_context_length: int, images: ImageRules | None = None
) -> SampleJob:
    """Refuse a sampling request that cannot be carried out.

    The answer is the request with the number of tokens of every image.

    A prompt longer than the context is refused; reaching the context's end while sampling is
    not a mistake, it ends a sequence like `max_tokens` does.
    """
    prompt = count_images(job.prompt, images, "prompt")
    length = _check_row(token_row(prompt, images), "prompt", vocab_size, max_context_length)
    _check_range("num_samples", job.num_samples, 1, MAX_SAMPLES)
    _check_range("topk_prompt_logprobs", job.topk_prompt_logprobs, 0, min(MAX_TOPK, vocab_size))
    _check_range("topk_sample_logprobs", job.topk_sample_logprobs, 0, min(MAX_TOPK, vocab_size))
    _check_range("prompt_alt_tokens_k", job.prompt_alt_tokens_k, 0, MAX_TOPK)
    _check_cells(job, length, max_context_length - length)
    if job.prompt_logprobs_last_n is not None:
        if not job.prompt_logprobs:
            raise ValidationError("needs prompt_logprobs", "prompt_logprobs_last_n")
        _check_range("prompt_logprobs_last_n", job.prompt_logprobs_last_n, 1, length - 1)
    if job.target_prompt_logprobs is not None:
        path = "target_prompt_logprobs"
        shape = _check_tensor(job.target_prompt_logprobs, path, dtype="int64", ranks=(2,))
        if shape[0] != length - 1:
            raise ValidationError(
                f"has {shape[0]} rows; a prompt of {length} tokens has {length - 1} to score", path
            )
        _check_vocabulary(job.target_prompt_logprobs, path, vocab_size, lowest=-1)
    try:
        _check_params(job.params, vocab_size)
    except ValidationError as error:
        raise error.under("sampling_params") from None
    if job.shaping is not None:
        _check_shaping(job.shaping, vocab_size)
    return replace(job, prompt=prompt)


def _check_cells(job: SampleJob, length: int, room: int) -> None:
    """Refuse an answer that would not fit into memory. It may be as long as its samples may."""
    asked = job.params.max_tokens
    num_sampled = job.num_samples * max(0, room if asked is None else min(room, asked))
    in_prompt = length * (job.topk_prompt_logprobs + job.prompt_alt_tokens_k)
    in_samples = num_sampled * job.topk_sample_logprobs
    if in_prompt + in_samples > MAX_CELLS:
        raise ValidationError(
            f"the answer may hold {in_prompt + in_samples} likeliest tokens; at most {MAX_CELLS} "
            "may be: ask for fewer at each position, for fewer samples, or set max_tokens",
            "topk_sample_logprobs" if in_samples > in_prompt else "topk_prompt_logprobs",
        )


def _check_shaping(shaping: Shaping, vocab_size: int) -> None:
    _check_range("min_p", shaping.min_p, 0, 1)
    _check_range("presence_penalty", shaping.presence_penalty, -2, 2)
    _check_range("frequency_penalty", shaping.frequency_penalty, -2, 2)
    _check_range("repetition_penalty", shaping.repetition_penalty, 0.01, 100)
    if len(shaping.logit_bias) > MAX_BIASES:
        problem = f"at most {MAX_BIASES} tokens, got {len(shaping.logit_bias)}"
        raise ValidationError(problem, "logit_bias")
    for token, bias in shaping.logit_bias.items():
        if not 0 <= token < vocab_size:
            raise ValidationError(_outside(token, vocab_size), "logit_bias")
        _check_range(f"logit_bias.{token}", bias, -100, 100)


def _check_params(params: SamplingParams, vocab_size: int) -> None:
    if params.max_tokens is not None and params.max_tokens < 0:
        raise ValidationError(f"must not be negative, got {params.max_tokens}", "max_tokens")
    if not 0 <= params.temperature < math.inf:
        raise ValidationError(
            f"must be finite and not negative, got {params.temperature}", "temperature"
        )
    if params.top_k != -1 and params.top_k < 1:
        raise ValidationError(
            f"must be at least 1, or -1 for no limit, got {params.top_k}", "top_k"
        )
    if not 0 < params.top_p <= 1:
        raise ValidationError(f"must be above 0 and at most 1, got {params.top_p}", "top_p")
    if params.seed is not None and not -(2**63) <= params.seed < 2**63:
        raise ValidationError(f"must fit 64 bits, got {params.seed}", "seed")
    stop = params.stop
    entries: list[str | int] = [stop] if isinstance(stop, str) else list(stop or ())
    num_strings = sum(isinstance(entry, str) for entry in entries)
    if num_strings > MAX_STOP_STRINGS:
        raise ValidationError(f"at most {MAX_STOP_STRINGS} texts, got {num_strings}", "stop")
    for index, entry in enumerate(entries):
        if isinstance(entry, str):
            if len(entry) > MAX_STOP_CHARACTERS:
                problem = f"at most {MAX_STOP_CHARACTERS} characters, got {len(entry)}"
                raise ValidationError(problem, f"stop[{index}]")
            if not entry:
                raise ValidationError("an empty text would stop at once", f"stop[{index}]")
        elif not 0 <= entry < vocab_size:
            raise ValidationError(_outside(entry, vocab_size), f"stop[{index}]")


def _check_config(loss_fn: str, config: Mapping[str, float | str], spec: LossSpec) -> None:
    for key, value in config.items():
        path = f"loss_fn_config.{key}"
        if key not in spec.config:
            known = ", ".join(spec.config) or "none"
            raise ValidationError(f"{loss_fn} has no such setting; known: {known}", path)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValidationError(f"must be a number, got {value!r}", path)
        if not math.isfinite(value):
            raise ValidationError(f"must be finite, got {value}", path)


def _with_input(datum: Datum, model_input: ModelInput) -> Datum:
    return Datum(
        model_input=model_input,
        loss_fn_inputs=datum.loss_fn_inputs,
        model_input_spans=datum.model_input_spans,
        loss_fn_input_spans=datum.loss_fn_input_spans,
    )


def _custom_of(request: Pass) -> CustomLoss:
    for key in request.loss_fn_config:
        if key != "loss_id":
            raise ValidationError(
                "custom has no such setting; known: loss_id", f"loss_fn_config.{key}"
            )
    if request.custom_loss is None:
        raise ValidationError("loss 'custom' came without its graph", "loss_fn_config.loss_id")
    return request.custom_loss


def _check_row(tokens: Array, path: str, vocab_size: int, max_length: int) -> int:
    """Check the tokens of an input; returns how many there are."""
    if not len(tokens):
        raise ValidationError("has no tokens", path)
    if len(tokens) > max_length:
        raise TooLargeError(
            f"has {len(tokens)} tokens; the model's context holds {max_length}", path
        )
    _check_tokens(tokens, path, vocab_size)
    return len(tokens)


def _check_targets(datum: Datum, length: int, vocab_size: int) -> None:
    path = "loss_fn_inputs.target_tokens"
    targets = datum.loss_fn_inputs.get("target_tokens")
    if targets is None:
        raise ValidationError("every loss needs this input", path)
    shape = _check_tensor(targets, path, dtype="int64", ranks=(1, 2))
    if shape[0] != length:
        raise ValidationError(
            f"has {shape[0]} positions and model_input has {length}; position t of the input "
            "predicts target t, so they must be equal",
            path,
        )
    _check_vocabulary(targets, path, vocab_size, lowest=0)


def _check_inputs(loss_fn: str, inputs: Mapping[str, TensorData], spec: LossSpec) -> None:
    """The names, dtypes and shapes of a built-in loss's inputs, and that they are finite."""
    shape = _shape(inputs["target_tokens"])
    if len(shape) not in spec.target_ranks:
        raise ValidationError(
            f"{loss_fn} takes one target for each position, got shape {list(shape)}",
            "loss_fn_inputs.target_tokens",
        )
    for name in spec.required:
        if name not in inputs:
            raise ValidationError(f"{loss_fn} needs this input", f"loss_fn_inputs.{name}")
    for name, tensor in inputs.items():
        if name == "target_tokens":
            continue
        path = f"loss_fn_inputs.{name}"
        if name not in spec.required and name not in spec.optional:
            known = ", ".join(["target_tokens", *spec.required, *spec.optional])
            raise ValidationError(f"{loss_fn} reads no such input; it reads: {known}", path)
        given = _check_tensor(tensor, path, dtype="float32", ranks=(len(shape),))
        if given != shape:
            raise ValidationError(f"has shape {list(given)}, target_tokens {list(shape)}", path)
        _check_finite(tensor, path)


def _check_custom_inputs(inputs: Mapping[str, TensorData], custom: CustomLoss) -> None:
    """The inputs an uploaded loss declared; others may be present, and it cannot see them."""
    for declared in custom.inputs:
        name = "target_tokens" if declared.name == "logprobs" else declared.name
        path = f"loss_fn_inputs.{name}"
        if name not in inputs:
            raise ValidationError("the custom loss reads this input", path)
        shape = _check_tensor(inputs[name], path, dtype=None, ranks=(0, 1, 2))
        if len(shape) != declared.rank:
            raise ValidationError(
                f"has shape {list(shape)}, but the custom loss declared {declared.name} with "
                f"rank {declared.rank}",
                path,
            )
        if name in _FINITE_INPUTS:
            _check_finite(inputs[name], path)


def _check_meaning(
    loss_fn: str,
    inputs: Mapping[str, TensorData],
    spec: LossSpec,
    config: Mapping[str, float | str],
) -> None:
    """Rules between the inputs of a loss, checked once each is known to be well formed."""
    if "clip_low_threshold" in spec.config:
        settings = {**spec.config, **config}
        bounds = [
            inputs[name].numpy if name in inputs else np.float64(settings[name])
            for name in ("clip_low_threshold", "clip_high_threshold")
        ]
        crossed = np.atleast_1d(bounds[0] > bounds[1])
        if crossed.any():
            where = f", at position {int(np.argmax(crossed))}" if crossed.size > 1 else ""
            raise ValidationError(
                f"{loss_fn}'s clip_low_threshold is above its clip_high_threshold{where}",
                "loss_fn_inputs" if where else "loss_fn_config",
            )
    if "sequence_ratio_mask" in spec.required:
        path = "loss_fn_inputs.sequence_ratio_mask"
        mask = inputs["sequence_ratio_mask"].numpy
        wrong = (mask != 0) & (mask != 1)
        if wrong.any():
            position = int(np.argmax(wrong))
            raise ValidationError(f"must be 0 or 1, got {mask[position]:g}", f"{path}[{position}]")
        if not mask.any():
            raise ValidationError("selects no token, so there is no sequence ratio", path)


def _check_tensor(
    tensor: TensorData, path: str, *, dtype: str | None, ranks: tuple[int, ...]
) -> tuple[int, ...]:
    """Check a tensor's dtype, rank and size; returns its shape. CSR checks itself when made."""
    if dtype is not None and tensor.dtype != dtype:
        raise ValidationError(f"must be {dtype}, got {tensor.dtype}", path)
    shape = _shape(tensor)
    if len(shape) not in ranks:
        wanted = " or ".join(map(str, ranks))
        raise ValidationError(f"must have rank {wanted}, got shape {list(shape)}", path)
    if math.prod(shape) > MAX_TARGETS:
        raise TooLargeError(f"shape {list(shape)} has more than {MAX_TARGETS} cells", path)
    return shape


def _shape(tensor: TensorData) -> tuple[int, ...]:
    return tuple(tensor.shape or ()) if tensor.is_sparse else tensor.numpy.shape


def _check_finite(tensor: TensorData, path: str) -> None:
    values = tensor.numpy
    # The sum of squares is one pass and rarely overflows; only then is every value looked at.
    if values.dtype.kind != "f" or math.isfinite(np.vdot(values, values)):
        return
    wrong = ~np.isfinite(values)
    if wrong.any():
        position = _first(wrong)
        raise ValidationError(
            f"must be finite, got {values[tuple(position)]}",
            f"{_values_path(tensor, path)}{position}",
        )


def _check_vocabulary(tensor: TensorData, path: str, vocab_size: int, *, lowest: int) -> None:
    _check_tokens(tensor.numpy, _values_path(tensor, path), vocab_size, lowest=lowest)


def _check_tokens(tokens: Array, path: str, vocab_size: int, *, lowest: int = 0) -> None:
    if tokens.size and (tokens.min() < lowest or tokens.max() >= vocab_size):
        position = _first((tokens < lowest) | (tokens >= vocab_size))
        token = int(tokens[tuple(position)])
        raise ValidationError(_outside(token, vocab_size), f"{path}{position}")


def _values_path(tensor: TensorData, path: str) -> str:
    """Where the stored numbers are: CSR lists only some cells, so a position counts those."""
    return f"{path}.data" if tensor.is_sparse else path


def _first(wrong: Array) -> list[int]:
    """Where the first true cell is; printed, it is a path's index."""
    return [int(index) for index in np.unravel_index(int(np.argmax(wrong)), wrong.shape)]


def _outside(token: int, vocab_size: int) -> str:
    return f"token {token} is outside the vocabulary; known: 0 to {vocab_size - 1}"


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValidationError(f"must be between {low} and {high}, got {value}", name)
