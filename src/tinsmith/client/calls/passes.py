"""A pass over data: cut into chunks, each posted in its turn, the outputs fetched and joined."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from tinsmith.client.calls import chunking
from tinsmith.client.calls.combining import combine
from tinsmith.client.futures import AwaitableConcurrentFuture
from tinsmith.client.results.retrieval import pass_kind, retrieve
from tinsmith.errors import APIStatusError
from tinsmith.types import (
    Datum,
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    ForwardRequest,
    LossFnType,
    ModelID,
    UntypedAPIFuture,
)
from tinsmith.wire import endpoints, proto, zstd

if TYPE_CHECKING:
    from tinsmith.client.calls.turns import Turns
    from tinsmith.client.results.queue_state import QueueStateObserver
    from tinsmith.client.uplink.uplink import Uplink

T = TypeVar("T")


class PassFuture(AwaitableConcurrentFuture[ForwardBackwardOutput]):
    """The result of `forward` or `forward_backward`, also part by part.

    A large call is sent as several requests. `chunks` has a future for the output of each, in the
    order of the data; `as_completed(future.chunks)` gives them as they arrive.
    """

    def __init__(
        self,
        future: Future[ForwardBackwardOutput],
        chunks: tuple[AwaitableConcurrentFuture[ForwardBackwardOutput], ...],
    ) -> None:
        super().__init__(future)
        self.chunks = chunks


@dataclass(frozen=True, slots=True)
class _Chunk:
    """The part of a pass that is one request."""

    seq_id: int
    inputs: ForwardBackwardInput
    part: AwaitableConcurrentFuture[ForwardBackwardOutput]


class Passes:
    """The passes of one model, among its other operations in `turns`."""

    def __init__(
        self, uplink: Uplink, model_id: ModelID, turns: Turns, observer: QueueStateObserver
    ) -> None:
        self._uplink = uplink
        self._model_id = model_id
        self._turns = turns
        self._observer = observer

    def submit(
        self,
        data: list[Datum],
        loss_fn: LossFnType,
        loss_fn_config: Mapping[str, float | str] | None,
        *,
        forward_only: bool,
    ) -> PassFuture:
        flags = self._uplink.get_client_config()
        cut = list(
            chunking.split(
                chunking.checked(data),
                max_items=flags.fwdbwd_max_chunk_len,
                max_bytes=flags.fwdbwd_max_chunk_bytes_count,
            )
        )
        if not cut:
            raise ValueError("a pass needs at least one datum, got none")
        # Checked before an id is taken: a mistake here must not leave a gap.
        inputs = [ForwardBackwardInput(each, loss_fn, loss_fn_config) for each in cut]
        ids = self._turns.reserve(len(cut))
        chunks = [
            _Chunk(seq_id, each, AwaitableConcurrentFuture(Future()))
            for seq_id, each in zip(ids, inputs, strict=True)
        ]
        future = self._uplink.submit(self._run, chunks, forward_only).future()
        self._turns.release_after(future, ids, self._uplink.get_loop())
        parts = tuple(chunk.part for chunk in chunks)
        future.add_done_callback(lambda done: _settle_parts(done, parts))
        return PassFuture(future, parts)

    async def _run(self, chunks: list[_Chunk], forward_only: bool) -> ForwardBackwardOutput:
        with self._uplink.spans.span(
            "forward" if forward_only else "forward_backward",
            model_id=self._model_id,
            seq_id=chunks[0].seq_id,
            datums=sum(len(chunk.inputs.data) for chunk in chunks),
            chunks=len(chunks),
        ):
            started = time.monotonic()
            promises = await self._post_all(chunks, forward_only)
            kind = pass_kind(forward_only=forward_only)

            async def fetch(promise: UntypedAPIFuture, chunk: _Chunk) -> ForwardBackwardOutput:
                output = await retrieve(
                    self._uplink,
                    promise,
                    kind,
                    roundtrip_seconds=time.monotonic() - started,
                    observer=self._observer,
                )
                _settle(chunk.part.future(), output)
                return output

            outputs = await asyncio.gather(*map(fetch, promises, chunks))
            return combine(outputs)

    async def _post_all(self, chunks: list[_Chunk], forward_only: bool) -> list[UntypedAPIFuture]:
        first, *rest = chunks
        if not self._uplink.get_client_config().parallel_fwdbwd_chunks:
            posted = (self._post(chunk, forward_only) for chunk in chunks)
            return list(await asyncio.gather(*posted))
        # The service starts with the first id. It is sent last, so that all others are there by
        # then and the service can run them together.
        later = await asyncio.gather(
            *(self._post(chunk, forward_only, after=first.seq_id) for chunk in rest),
            return_exceptions=True,
        )
        refusal = next((each for each in later if isinstance(each, BaseException)), None)
        if refusal is not None and not isinstance(refusal, APIStatusError):
            raise refusal
        # Sent after a refusal, too: an id that never comes would hold up all later ones.
        promises = [await self._post(first, forward_only)]
        if refusal is not None:
            raise refusal
        return promises + [each for each in later if isinstance(each, UntypedAPIFuture)]

    async def _post(
        self, chunk: _Chunk, forward_only: bool, *, after: int | None = None
    ) -> UntypedAPIFuture:
        cls = ForwardRequest if forward_only else ForwardBackwardRequest
        num_bytes = sum(datum.nbytes for datum in chunk.inputs.data)
        async with (
            self._turns.take(chunk.seq_id, after=after),
            self._uplink.pass_budget.hold(num_bytes),
        ):
            body = proto.encode_pass(cls(chunk.inputs, self._model_id, chunk.seq_id))
            headers = {}
            if self._uplink.get_client_config().proto_compress_fwdbwd:
                body = await asyncio.to_thread(zstd.compress, body)
                headers["Content-Encoding"] = "zstd"
            return await self._uplink.api.call(endpoints.FORWARD_BACKWARD, body, headers=headers)


def _settle(future: Future[T], value: T) -> None:
    if future.set_running_or_notify_cancel():
        future.set_result(value)


def _settle_parts(
    whole: Future[ForwardBackwardOutput],
    parts: tuple[AwaitableConcurrentFuture[ForwardBackwardOutput], ...],
) -> None:
    """When the whole call fails or is cancelled, so do the parts that have no result yet."""
    for part in parts:
        if part.done():
            continue
        if whole.cancelled():
            part.cancel()
        elif (error := whole.exception()) is not None and (
            part.future().set_running_or_notify_cancel()
        ):
            part.future().set_exception(error)
