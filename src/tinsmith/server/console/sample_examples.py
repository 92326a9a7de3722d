"""A few answers of each sampler of a run, to be looked at: in memory first, then in the store."""

from __future__ import annotations

from typing import Any

from tinsmith.engine.base import SampleJob
from tinsmith.server.store.observing.examples import MOST_TOKENS, SampledExample
from tinsmith.server.store.records import ExampleRecord, SamplerRecord
from tinsmith.server.store.store import Store
from tinsmith.types import EncodedTextChunk, ModelInput, SampledSequence, SampleResponse
from tinsmith.types.checkpoints import ParsedCheckpointTinkerPath
from tinsmith.types.observing import NO_TEXT
from tinsmith.wire import json

_MAX_SAMPLERS = 10_000
"""Of which it is known how many answers are kept; one that was forgotten may get a few more."""


class SampledExamples:
    def __init__(self, store: Store, most: int) -> None:
        """`most` is how many answers of each sampler are kept; 0 keeps none."""
        self._store = store
        self._most = most
        self._num_kept: dict[str, int] = {}
        self._new: list[SampledExample] = []

    def keep(self, sampler: SamplerRecord, job: SampleJob, response: SampleResponse) -> None:
        """Keep the first answers of a sampler whose weights are a run's of its owner."""
        if not self._most or not sampler.session_id or sampler.model_id is None:
            return
        known = self._num_kept.pop(sampler.sampler_id, 0)
        kept = response.sequences[: self._most - known]
        self._num_kept[sampler.sampler_id] = known + len(kept)
        if len(self._num_kept) > _MAX_SAMPLERS:
            del self._num_kept[next(iter(self._num_kept))]
        self._new += [_example(sampler, sampler.model_id, job, sequence) for sequence in kept]

    async def flush(self) -> None:
        new, self._new = self._new, []
        try:
            await self._store.examples.add_sampled(new)
        except Exception:
            self._new = new + self._new
            raise


def _example(
    sampler: SamplerRecord, run: str, job: SampleJob, sequence: SampledSequence
) -> SampledExample:
    body = json.encode(_body(job.prompt, sequence))
    made = sampler.sampler_id
    if sampler.model_path is not None:
        made = ParsedCheckpointTinkerPath.from_tinker_path(sampler.model_path).checkpoint_id
    record = ExampleRecord(
        owner=sampler.owner, model_id=run, seq_id=0, num_bytes=len(body), body=body
    )
    return SampledExample(record, made)


def _body(prompt: ModelInput, sequence: SampledSequence) -> dict[str, Any]:
    body = {
        "source": "sampled",
        "prompt_ids": _prompt_ids(prompt)[-MOST_TOKENS:],
        "ids": sequence.tokens[:MOST_TOKENS],
        "length": len(sequence.tokens),
        "stop_reason": sequence.stop_reason,
    }
    if sequence.logprobs is not None:
        body["logprobs"] = sequence.logprobs[:MOST_TOKENS]
    return body


def _prompt_ids(prompt: ModelInput) -> list[int]:
    ids: list[int] = []
    for chunk in prompt.chunks:
        ids += chunk.tokens if isinstance(chunk, EncodedTextChunk) else [NO_TEXT]
    return ids
