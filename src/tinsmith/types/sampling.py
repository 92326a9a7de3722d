"""Sampling: what a client asks for, and the sequences that come back.

Results are numpy inside (`tokens_np`, `logprobs_np`, …); the properties without the suffix show
them as lists and convert on first use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from tinsmith.errors import ValidationError
from tinsmith.types import notebook
from tinsmith.types.arrays import int_array, short_array
from tinsmith.types.convert import converter, kind_of
from tinsmith.types.inputs import ModelInput
from tinsmith.types.model import Request, Response, dump
from tinsmith.types.non_finite import ResultFloat, array_to_json, from_json
from tinsmith.types.tensors import TensorData

StopReason = Literal["length", "stop"]

MASK_LOGPROB = -99999.0
"""With token 0, the mark of an empty cell in a top-k matrix."""

_MOST_SHOWN = 8
"""Sequences, where a response is shown to people."""

TopkList = list[list[tuple[int, float]] | None]


class SamplingParams(Response):
    """How to choose tokens.

    `stop` absent means the model's own end of sequence; an empty list means nothing stops it but
    `max_tokens`. Temperature 0 takes the likeliest token. (Unknown fields are ignored, as in the
    official package, where this is the one request value that tolerates them.)
    """

    __wire_mode__ = "wire"  # it is part of a request

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | Sequence[str] | Sequence[int] | None = None
    temperature: float = 1
    top_k: int = -1
    """-1 means no limit."""
    top_p: float = 1


class SampleRequest(Request):
    num_samples: int = 1
    prompt: ModelInput
    sampling_params: SamplingParams
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: int | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: TensorData | None = None
    """Token ids to score, int64 [prompt length - 1, K]; -1 asks for nothing in that cell."""
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None
    type: Literal["sample"] = "sample"


class CreateSamplingSessionRequest(Request):
    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None
    type: Literal["create_sampling_session"] = "create_sampling_session"


class CreateSamplingSessionResponse(Response):
    type: Literal["create_sampling_session"] = "create_sampling_session"
    sampling_session_id: str


class JoinSamplingSessionRequest(Request):
    sampling_session_id: str
    type: Literal["join_sampling_session"] = "join_sampling_session"


class JoinSamplingSessionResponse(Response):
    type: Literal["join_sampling_session"] = "join_sampling_session"
    client_counter: int


class GetSamplerResponse(Response):
    sampler_id: str
    base_model: str
    model_path: str | None = None


class SamplerInfo(GetSamplerResponse):
    """What our server answers; clients that do not know the added field ignore it."""

    tokenizer_id: str | None = None
    """Where the tokenizer is, if not under the name of the base model."""


@dataclass(frozen=True, eq=False)
class TopkLogprobs:
    """The k likeliest tokens at each position, as two matrices of shape (positions, k).

    A cell with token 0 and log-probability -99999 is empty.
    """

    __slots__ = ("logprobs", "token_ids")

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]

    def to_lists(self) -> TopkList:
        """Per position the (token, log-probability) pairs, None where there are none."""
        positions, k = self.token_ids.shape
        if positions == 0 or k == 0:
            return []
        empty = (self.token_ids == 0) & (self.logprobs == MASK_LOGPROB)
        # Trailing empty cells are cut: count what is left up to the last filled cell.
        filled = np.where(empty.all(axis=1), 0, k - np.argmin(empty[:, ::-1], axis=1))
        rows = zip(self.token_ids.tolist(), self.logprobs.tolist(), strict=True)
        return [
            None if blank else list(zip(ids[:n], values[:n], strict=True))
            for (ids, values), n, blank in zip(
                rows, filled.tolist(), empty[:, 0].tolist(), strict=True
            )
        ]

    @classmethod
    def from_lists(cls, rows: Sequence[Sequence[Sequence[Any]] | None]) -> Self:
        """The matrices of a list of rows; short and missing rows are filled with empty cells."""
        k = max((len(row) for row in rows if row), default=0)
        token_ids = np.zeros((len(rows), k), dtype=np.int32)
        logprobs = np.full((len(rows), k), MASK_LOGPROB, dtype=np.float32)
        for index, row in enumerate(rows):
            for column, (token, logprob) in enumerate(row or ()):
                token_ids[index, column] = token
                logprobs[index, column] = from_json(logprob)
        return cls(token_ids=token_ids, logprobs=logprobs)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TopkLogprobs):
            return NotImplemented
        return _same(self.token_ids, other.token_ids) and _same(self.logprobs, other.logprobs)

    __hash__ = None  # type: ignore[assignment]  # arrays are compared by content

    def __repr__(self) -> str:
        positions, k = self.token_ids.shape
        return f"TopkLogprobs({positions} positions, k={k})"

    def __getstate__(self) -> tuple[Any, Any]:
        return self.token_ids, self.logprobs

    def __setstate__(self, state: tuple[Any, Any]) -> None:
        object.__setattr__(self, "token_ids", state[0])
        object.__setattr__(self, "logprobs", state[1])


@dataclass(frozen=True)
class PromptAltTokens:
    """Draws from the model's distribution at every prompt position after the first.

    Both tensors are [prompt length - 1, k]; row i holds alternatives to prompt token i + 1.
    """

    tokens: TensorData
    logprobs: TensorData


@dataclass(frozen=True, eq=False, repr=False)
class SampledSequence:
    """One continuation of the prompt."""

    stop_reason: StopReason
    sequence_id: str
    """Names this sequence in later requests, for example in a datum's provenance."""
    tokens_np: npt.NDArray[np.int32] | None = None
    logprobs_np: npt.NDArray[np.float32] | None = None
    topk_logprobs_np: TopkLogprobs | None = None
    _tokens_list: list[int] | None = field(default=None, repr=False)
    _logprobs_list: list[float] | None = field(default=None, repr=False)
    _topk_logprobs_list: TopkList | None = field(default=None, repr=False)

    @cached_property
    def tokens(self) -> list[int]:
        if self._tokens_list is not None:
            return self._tokens_list
        return [] if self.tokens_np is None else self.tokens_np.tolist()

    @cached_property
    def logprobs(self) -> list[float] | None:
        if self._logprobs_list is not None:
            return self._logprobs_list
        return None if self.logprobs_np is None else self.logprobs_np.tolist()

    @cached_property
    def topk_logprobs(self) -> TopkList | None:
        if self._topk_logprobs_list is not None:
            return self._topk_logprobs_list
        return None if self.topk_logprobs_np is None else self.topk_logprobs_np.to_lists()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SampledSequence):
            return NotImplemented
        return (
            self.stop_reason == other.stop_reason
            and self.sequence_id == other.sequence_id
            and self.tokens == other.tokens
            and _same(_float_array(self.logprobs), _float_array(other.logprobs))
            and self.topk_logprobs == other.topk_logprobs
        )

    __hash__ = None  # type: ignore[assignment]  # compared by content, like a list

    def __repr__(self) -> str:
        tokens = short_array(np.asarray(self.tokens, dtype=np.int64))
        return (
            f"SampledSequence(stop_reason={self.stop_reason!r}, "
            f"sequence_id={self.sequence_id!r}, tokens={tokens})"
        )

    def _repr_html_(self) -> str:
        """For notebooks: the tokens, coloured by their log-probabilities."""
        title = f"{len(self.tokens):,} tokens, ended by {self.stop_reason}"
        return notebook.scored(self.tokens, self.logprobs, title)


@dataclass(frozen=True, eq=False, repr=False)
class SampleResponse:
    """The answer to a sampling request: its sequences, and what was asked about the prompt."""

    sequences: Sequence[SampledSequence]
    prompt_logprobs_np: npt.NDArray[np.float32] | None = None
    """One number per prompt token, NaN where none was computed (always at the first)."""
    topk_prompt_logprobs_np: TopkLogprobs | None = None
    target_prompt_logprobs: TensorData | None = None
    """Shaped and laid out like the request's; 0 in cells that asked for nothing."""
    prompt_cache_hit_tokens: int = 0
    prompt_alt_tokens: PromptAltTokens | None = None
    _prompt_logprobs_list: list[float | None] | None = field(default=None, repr=False)
    _topk_prompt_logprobs_list: TopkList | None = field(default=None, repr=False)

    @cached_property
    def prompt_logprobs(self) -> list[float | None] | None:
        if self._prompt_logprobs_list is not None:
            return self._prompt_logprobs_list
        if self.prompt_logprobs_np is None:
            return None
        values: list[float | None] = self.prompt_logprobs_np.tolist()
        for index in np.flatnonzero(np.isnan(self.prompt_logprobs_np)).tolist():
            values[index] = None
        return values

    @cached_property
    def topk_prompt_logprobs(self) -> TopkList | None:
        if self._topk_prompt_logprobs_list is not None:
            return self._topk_prompt_logprobs_list
        topk = self.topk_prompt_logprobs_np
        return None if topk is None else topk.to_lists()

    @classmethod
    def model_validate(cls, obj: Any) -> Self:
        """From the JSON form that releases up to 0.24.1 read, or an instance as it is."""
        if isinstance(obj, cls):
            return obj
        if not isinstance(obj, Mapping):
            raise ValidationError(f"expected an object, got {kind_of(obj)}")
        sequences = obj.get("sequences")
        if not isinstance(sequences, Sequence):
            raise ValidationError("a sample response needs this list", "sequences")
        try:
            with np.errstate(over="raise"):
                return cls._from_wire(obj, sequences)
        except ValidationError:
            raise
        except (TypeError, ValueError, ArithmeticError) as error:
            raise ValidationError(f"not a sample response: {error}") from None

    @classmethod
    def _from_wire(cls, obj: Mapping[str, Any], sequences: Sequence[Any]) -> Self:
        prompt = converter(list[ResultFloat | None] | None)(obj.get("prompt_logprobs"))
        topk = obj.get("topk_prompt_logprobs")
        if prompt is not None:
            prompt = np.array([np.nan if v is None else v for v in prompt], dtype=np.float32)
        return cls(
            sequences=[_sequence_from_wire(s, index) for index, s in enumerate(sequences)],
            prompt_logprobs_np=prompt,
            topk_prompt_logprobs_np=None if topk is None else TopkLogprobs.from_lists(topk),
        )

    def to_wire(self) -> dict[str, Any]:
        """The JSON form that releases up to 0.24.1 read; it has no place for the newer parts."""

        def plain(value: Any) -> Any:
            return dump(value, mode="answer", exclude_none=True)

        return {
            "sequences": [
                {
                    "stop_reason": sequence.stop_reason,
                    "tokens": np.asarray(sequence.tokens, dtype=np.int32),
                    "logprobs": _json_logprobs(sequence),
                }
                for sequence in self.sequences
            ],
            "prompt_logprobs": plain(self.prompt_logprobs),
            "topk_prompt_logprobs": plain(self.topk_prompt_logprobs),
            "type": "sample",
        }

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SampleResponse):
            return NotImplemented
        return (
            list(self.sequences) == list(other.sequences)
            and self.prompt_logprobs == other.prompt_logprobs
            and self.topk_prompt_logprobs == other.topk_prompt_logprobs
            and self.target_prompt_logprobs == other.target_prompt_logprobs
            and self.prompt_cache_hit_tokens == other.prompt_cache_hit_tokens
            and self.prompt_alt_tokens == other.prompt_alt_tokens
        )

    __hash__ = None  # type: ignore[assignment]  # compared by content, like a list

    def __repr__(self) -> str:
        sequences = [repr(each) for each in self.sequences[:_MOST_SHOWN]]
        if len(self.sequences) > len(sequences):
            sequences.append(f"… {len(self.sequences)} sequences")
        parts = [f"sequences=[{', '.join(sequences)}]"]
        if self.prompt_logprobs_np is not None:
            parts.append(f"prompt_logprobs={short_array(self.prompt_logprobs_np)}")
        if self.prompt_cache_hit_tokens:
            parts.append(f"prompt_cache_hit_tokens={self.prompt_cache_hit_tokens}")
        return f"SampleResponse({', '.join(parts)})"

    def _repr_html_(self) -> str:
        """For notebooks: the first sequences, one below the other."""
        shown = [each._repr_html_() for each in self.sequences[:_MOST_SHOWN]]
        if len(self.sequences) > len(shown):
            shown.append(f"<div>… and {len(self.sequences) - len(shown):,} more sequences</div>")
        return "".join(shown)


def _sequence_from_wire(obj: Any, index: int) -> SampledSequence:
    try:
        if not isinstance(obj, Mapping):
            raise ValidationError(f"expected an object, got {kind_of(obj)}")
        stop_reason = converter(StopReason)(obj.get("stop_reason"))
        logprobs = converter(list[ResultFloat] | None)(obj.get("logprobs"))
        return SampledSequence(
            stop_reason=stop_reason,
            sequence_id="",
            tokens_np=int_array(obj.get("tokens")),
            logprobs_np=None if logprobs is None else np.array(logprobs, dtype=np.float32),
        )
    except ValidationError as error:
        raise error.under(f"sequences[{index}]") from None


def _json_logprobs(sequence: SampledSequence) -> Any:
    if sequence.logprobs_np is None:
        return dump(sequence.logprobs, mode="answer", exclude_none=True)
    return array_to_json(sequence.logprobs_np)


def _float_array(values: list[float] | None) -> npt.NDArray[np.float32] | None:
    return None if values is None else np.array(values, dtype=np.float32)


def _same(left: npt.NDArray[Any] | None, right: npt.NDArray[Any] | None) -> bool:
    if left is None or right is None:
        return left is right
    return np.array_equal(left, right, equal_nan=left.dtype.kind == "f")
