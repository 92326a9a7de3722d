"""The experts that sampled tokens went to, kept for the training passes that follow.

In memory only, by owner and sampling request, for a time and within a bound on bytes. Where that is
full, the owner who takes most gives way, oldest first, so that whoever samples much costs nobody
else. What was dropped is no loss but of precision: the pass then routes by itself.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from dataclasses import dataclass

import numpy as np

from tinsmith.engine.base import ExpertsChosen, SampleJob
from tinsmith.types import EncodedTextChunk, SampleResponse


@dataclass(frozen=True, slots=True)
class KeptSequence:
    """A sampled sequence and its prompt: the tokens, and the experts of all but the last."""

    base_model: str
    prompt: np.ndarray
    sampled: np.ndarray
    prompt_choices: np.ndarray
    """(T, L, k), as `engine.expert_choices` has them; all samples of a prompt share them..."""

    choices: np.ndarray
    """... and those of the tokens behind."""

    @property
    def num_known(self) -> int:
        """For how many tokens, from the first on, experts are known."""
        return len(self.prompt_choices) + len(self.choices)

    def begins_with(self, tokens: np.ndarray) -> bool:
        """Whether its first tokens are these."""
        length = len(self.prompt)
        return np.array_equal(tokens[:length], self.prompt[: len(tokens)]) and np.array_equal(
            tokens[length:], self.sampled[: max(0, len(tokens) - length)]
        )

    def copy_choices(self, start: int, stop: int, into: np.ndarray) -> None:
        """The experts of its tokens start to stop."""
        edge = len(self.prompt_choices)
        middle = min(max(edge, start), stop)
        into[: middle - start] = self.prompt_choices[start:middle]
        into[middle - start :] = self.choices[max(0, start - edge) : max(0, stop - edge)]


class KeptExperts:
    def __init__(self, max_bytes: int, max_seconds: float) -> None:
        self._max_bytes = max_bytes
        self._max_seconds = max_seconds
        self._of_owner: dict[str, OrderedDict[str, _Kept]] = {}
        """By owner and sampling request, the oldest first."""
        self._num_bytes: Counter[str] = Counter()

    @property
    def num_bytes(self) -> int:
        return self._num_bytes.total()

    def keep(
        self, owner: str, job: SampleJob, response: SampleResponse, chosen: ExpertsChosen
    ) -> None:
        """Take down what became of a sampling request, if there is room for it at all."""
        if not all(isinstance(chunk, EncodedTextChunk) for chunk in job.prompt.chunks):
            return
        sampled = [np.asarray(sequence.tokens, np.int32) for sequence in response.sequences]
        arrays = [job.prompt.tokens_np(), chosen.prompt, *sampled, *chosen.samples]
        num_bytes = sum(each.nbytes for each in arrays)
        if num_bytes > self._max_bytes:
            return
        # Copies: these are views of a whole request, and of a message that has others' answers.
        prompt, prompt_choices = arrays[0].copy(), chosen.prompt.copy()
        sequences = tuple(
            KeptSequence(job.base_model, prompt, tokens, prompt_choices, own.copy())
            for tokens, own in zip(sampled, chosen.samples, strict=True)
        )
        self._drop(owner, job.job_id)
        kept = _Kept(sequences, num_bytes, time.monotonic())
        self._of_owner.setdefault(owner, OrderedDict())[job.job_id] = kept
        self._num_bytes[owner] += num_bytes
        while self.num_bytes > self._max_bytes:
            largest = max(self._num_bytes, key=self._num_bytes.__getitem__)
            self._drop(largest, next(iter(self._of_owner[largest])))

    def find(self, owner: str, sequence_id: str) -> KeptSequence | None:
        """The owner's sequence of that id; another owner's is never found."""
        job_id, _, index = sequence_id.rpartition(":")
        kept = self._of_owner.get(owner, OrderedDict()).get(job_id)
        if kept is None or self._is_old(kept):
            return None
        # A client may have written anything there, such as a number of thousands of digits.
        numbers = {str(number): each for number, each in enumerate(kept.sequences)}
        return numbers.get(index)

    def expire(self) -> None:
        """Drop what is too old."""
        for owner, jobs in list(self._of_owner.items()):
            for job_id in [job_id for job_id, kept in jobs.items() if self._is_old(kept)]:
                self._drop(owner, job_id)

    def _is_old(self, kept: _Kept) -> bool:
        return time.monotonic() - kept.kept_at >= self._max_seconds

    def _drop(self, owner: str, job_id: str) -> None:
        kept = self._of_owner.get(owner, OrderedDict()).pop(job_id, None)
        if kept is None:
            return
        self._num_bytes[owner] -= kept.num_bytes
        if not self._of_owner[owner]:
            del self._of_owner[owner], self._num_bytes[owner]


@dataclass(frozen=True, slots=True)
class _Kept:
    """What is kept of one sampling request."""

    sequences: tuple[KeptSequence, ...]
    num_bytes: int
    kept_at: float
