"""Finding the experts of a pass: which sampled sequences it names, and what is known of them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tinsmith.engine.expert_choices import unknown
from tinsmith.server.operations import recorded_pass
from tinsmith.server.operations.codecs import pass_data
from tinsmith.server.operations.recorded_pass import WITH_EXPERTS, PassRequest, RecordedPass
from tinsmith.server.sampling.kept_experts import KeptExperts, KeptSequence
from tinsmith.types import Datum, EncodedTextChunk, PromptProvenanceSpan

_MAX_RUNS = 256
"""Runs of one datum that are compared with sampled sequences; a conversation has far fewer."""


def named_sequences(
    request: PassRequest, kept: KeptExperts, owner: str, base_model: str
) -> dict[str, KeptSequence]:
    """The sequences that a pass names as the source of its tokens, by id: of those kept, the
    owner's that this base model sampled."""
    data, _, _, _ = pass_data(request)
    named = {span.sequence_id for datum in data for span in datum.model_input_spans or ()}
    found = {sequence_id: kept.find(owner, sequence_id) for sequence_id in named}
    return {k: each for k, each in found.items() if each and each.base_model == base_model}


def with_experts(
    request: PassRequest, body: bytes, content_type: str, sequences: Mapping[str, KeptSequence]
) -> tuple[RecordedPass, bytes, str]:
    """A request with the experts that its tokens went to in these sequences; what is recorded of
    it, and as what."""
    data, _, _, _ = pass_data(request)
    choices = tuple(choices_for(datum, sequences) for datum in data)
    if all(each is None for each in choices):
        return RecordedPass(request), body, content_type
    encoded = recorded_pass.encode(body, content_type, choices)
    return RecordedPass(request, choices), encoded, WITH_EXPERTS


def choices_for(datum: Datum, sequences: Mapping[str, KeptSequence]) -> np.ndarray | None:
    """The experts that a datum's tokens went to when they were sampled, by the sequences it names.

    A token counts where it stands at the place, and behind the very tokens, that it had in the
    sampled sequence: elsewhere it was not read so. None where there is none.
    """
    if not all(isinstance(chunk, EncodedTextChunk) for chunk in datum.model_input.chunks):
        return None
    tokens = datum.model_input.tokens_np()
    found: np.ndarray | None = None
    start = num_runs = 0
    for span in datum.model_input_spans or ():
        stop = start + span.length
        sequence = sequences.get(span.sequence_id)
        if sequence is not None:
            is_prompt = isinstance(span, PromptProvenanceSpan)
            place = span.offset + (0 if is_prompt else len(sequence.prompt))
            last = min(stop, sequence.num_known, len(tokens))
            num_runs += 1
            is_same = place == start < last and num_runs <= _MAX_RUNS
            if is_same and sequence.begins_with(tokens[:last]):
                if found is None:
                    found = unknown(len(tokens), sequence.prompt_choices)
                sequence.copy_choices(start, last, found[start:last])
        start = stop
    return found
