"""What samplers gave, counted: in memory first, then added to the store now and then."""

from __future__ import annotations

import dataclasses
import time

from tinsmith.engine.base import SampleJob
from tinsmith.server.store.records import SamplerRecord, SamplerStatsRecord
from tinsmith.server.store.store import Store
from tinsmith.types import SampleResponse


class SamplerStats:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._counts: dict[str, SamplerStatsRecord] = {}

    def count(self, sampler: SamplerRecord, job: SampleJob, response: SampleResponse) -> None:
        """Count what a sampler of a session gave; those of one request have no session."""
        if not sampler.session_id:
            return
        now = time.time()
        lengths = [len(s.tokens_np) for s in response.sequences if s.tokens_np is not None]
        given = SamplerStatsRecord(
            sampler_id=sampler.sampler_id,
            owner=sampler.owner,
            model_id=sampler.model_id or "",
            num_requests=1,
            num_sequences=len(response.sequences),
            prompt_tokens=job.prompt.length,
            sampled_tokens=sum(lengths),
            longest_tokens=max(lengths, default=0),
            logprob_sum=sum(
                float(s.logprobs_np.sum()) for s in response.sequences if s.logprobs_np is not None
            ),
            num_stopped=sum(s.stop_reason == "stop" for s in response.sequences),
            first_at=now,
            last_at=now,
        )
        known = self._counts.get(sampler.sampler_id)
        self._counts[sampler.sampler_id] = given if known is None else _together(known, given)

    async def flush(self) -> None:
        counts, self._counts = self._counts, {}
        try:
            await self._store.samplers.add_stats(list(counts.values()))
        except Exception:
            for sampler_id, known in counts.items():
                newer = self._counts.get(sampler_id)
                self._counts[sampler_id] = known if newer is None else _together(known, newer)
            raise


def _together(first: SamplerStatsRecord, second: SamplerStatsRecord) -> SamplerStatsRecord:
    return dataclasses.replace(
        first,
        num_requests=first.num_requests + second.num_requests,
        num_sequences=first.num_sequences + second.num_sequences,
        prompt_tokens=first.prompt_tokens + second.prompt_tokens,
        sampled_tokens=first.sampled_tokens + second.sampled_tokens,
        longest_tokens=max(first.longest_tokens, second.longest_tokens),
        logprob_sum=first.logprob_sum + second.logprob_sum,
        num_stopped=first.num_stopped + second.num_stopped,
        last_at=second.last_at,
    )
