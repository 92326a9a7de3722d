"""SamplingClient: continuations and log-probabilities from one set of frozen weights."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import random
import time
import weakref
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import orjson

from tinsmith.client import tokenizers
from tinsmith.client.calls.prompt_questions import check_answers, check_questions
from tinsmith.client.futures import APIFuture, AwaitableConcurrentFuture
from tinsmith.client.results.poller import CompletionPoller
from tinsmith.client.results.queue_state import QueueState, QueueStateLogger, QueueStateObserver
from tinsmith.client.results.retries import RetryConfig, shared_retries
from tinsmith.client.results.retrieval import retrieve, sample_kind
from tinsmith.client.results.streaming import SampleStream
from tinsmith.client.twins import documented_twins
from tinsmith.client.uplink.loop import AwaitableFuture
from tinsmith.client.uplink.sharing import UPLINKS, SharedUplink, share
from tinsmith.client.uplink.telemetry import Telemetry
from tinsmith.client.uplink.uplink import Uplink
from tinsmith.errors import TinkerError, ValidationError
from tinsmith.transport.retry import RetryPolicy
from tinsmith.types import (
    CreateSamplingSessionRequest,
    EncodedTextChunk,
    JoinSamplingSessionRequest,
    ModelInput,
    SampleRequest,
    SampleResponse,
    SamplingParams,
    TensorData,
    UntypedAPIFuture,
)
from tinsmith.types.protocol import CLONE_BLOCK
from tinsmith.types.sampling import SamplerInfo
from tinsmith.wire import endpoints
from tinsmith.wire import json as wire_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

_BYTES_PER_TOKEN = 10
"""About what a token takes in a JSON body."""


@documented_twins
class SamplingClient(QueueStateObserver):
    """Samples from weights that do not change.

        response = sampling.sample(prompt, 4, SamplingParams(max_tokens=64)).result()
        response = await sampling.sample_async(prompt, 4, SamplingParams(max_tokens=64))

    Thousands of samples may be under way at once. A client can be pickled, or handed on as a string
    (`get_sampler_handle`), and used by many processes. You get one from
    `ServiceClient.create_sampling_client()` or from a training client.
    """

    def __init__(
        self,
        holder: Uplink,
        *,
        sampling_session_id: str,
        shadow: bool = False,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> None:
        self.holder = holder
        self._sampling_session_id = sampling_session_id
        self._record_stability_info = record_stability_info
        flags = holder.get_client_config()
        config = replace(
            retry_config or RetryConfig(),
            # The service decides. With a poller, waiting holds no socket and needs no limit.
            max_connections=(
                None if flags.sample_use_retrieve_futures else flags.sample_max_concurrent_requests
            ),
        )
        if not flags.sample_enable_stuck_detection:
            config = replace(config, enable_stuck_detection=False)
        self.retry_handler = shared_retries(
            holder, sampling_session_id, config, holder.api.repeater
        )
        self._observer = QueueStateLogger(
            f"Sampling from {sampling_session_id}", "limit of concurrent sampler weights reached"
        )
        self._clone_id: int | None = 0
        if shadow:
            joins = flags.sample_join_sampling_session
            self._clone_id = None if joins else random.SystemRandom().randint(1, CLONE_BLOCK)
        self._seq_ids = itertools.count((self._clone_id or 0) * CLONE_BLOCK)
        self._joining = asyncio.Lock()
        self._poller: CompletionPoller | None = None
        self._release: weakref.finalize[..., SamplingClient] | None = None

    def __repr__(self) -> str:
        return f"<SamplingClient of sampling session {self._sampling_session_id!r}>"

    @staticmethod
    def create(
        holder: Uplink,
        *,
        model_path: str | None = None,
        base_model: str | None = None,
        sampling_session_id: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> APIFuture[SamplingClient]:
        """A client for saved weights, a base model, or a sampling session that exists."""
        if model_path and not model_path.startswith("tinker://"):
            raise ValueError(f"model_path must start with 'tinker://', got {model_path[:80]!r}")
        seq_id = None if sampling_session_id else holder.next_sampling_session_seq_id()

        async def create() -> SamplingClient:
            session_id = sampling_session_id
            if seq_id is not None:
                session_id = await _open_sampling_session(holder, seq_id, model_path, base_model)
            assert session_id is not None, "one of the two is set"
            return SamplingClient(
                holder,
                sampling_session_id=session_id,
                retry_config=retry_config,
                record_stability_info=record_stability_info,
            )

        return holder.submit(create)

    # --- sampling -----------------------------------------------------------------------------

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: TensorData | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
    ) -> AwaitableFuture[SampleResponse]:
        """Continue `prompt` `num_samples` times.

        The other arguments ask about the prompt: its log-probabilities, of the last n tokens only;
        the likeliest tokens at each position; the log-probabilities of given tokens, int64
        [prompt length - 1, K] with -1 for cells not needed; or draws at each position.
        """
        check_questions(
            target_prompt_logprobs,
            prompt_alt_tokens_k,
            prompt_logprobs_last_n,
            include_prompt_logprobs,
        )
        request = SampleRequest(
            sampling_session_id=self._sampling_session_id,
            num_samples=num_samples,
            prompt=prompt,
            sampling_params=sampling_params,
            prompt_logprobs=include_prompt_logprobs,
            topk_prompt_logprobs=topk_prompt_logprobs,
            topk_sample_logprobs=topk_sample_logprobs,
            target_prompt_logprobs=target_prompt_logprobs,
            prompt_alt_tokens_k=prompt_alt_tokens_k,
            prompt_logprobs_last_n=prompt_logprobs_last_n,
            record_stability_info=self._record_stability_info,
        )
        repeats = not self.holder.get_client_config().sample_no_retries
        return self.holder.submit_future(self._sample, request, repeats)

    async def sample_async(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: TensorData | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
    ) -> SampleResponse:
        return await _or_cancel(
            self.sample(
                prompt,
                num_samples,
                sampling_params,
                include_prompt_logprobs,
                topk_prompt_logprobs,
                topk_sample_logprobs,
                target_prompt_logprobs,
                prompt_alt_tokens_k,
                prompt_logprobs_last_n,
            )
        )

    def stream(
        self, prompt: ModelInput, sampling_params: SamplingParams, num_samples: int = 1
    ) -> SampleStream:
        """Tokens as they are decoded, for a plain or an async loop; leaving it cancels the rest."""
        request = SampleRequest(
            sampling_session_id=self._sampling_session_id,
            seq_id=next(self._seq_ids),
            num_samples=num_samples,
            prompt=prompt,
            sampling_params=sampling_params,
        )
        policy = self._submit_policy(_estimated_bytes(prompt))
        return SampleStream(self.holder, request, policy)

    def compute_logprobs(
        self, prompt: ModelInput, prompt_logprobs_last_n: int | None = None
    ) -> AwaitableFuture[list[float | None]]:
        """The log-probability of each prompt token; None where there is none, as for the first.

        With `prompt_logprobs_last_n`, of the last n only, which lets the service reuse its prefix.
        """
        check_questions(None, 0, prompt_logprobs_last_n, True)
        request = SampleRequest(
            sampling_session_id=self._sampling_session_id,
            prompt=prompt,
            sampling_params=SamplingParams(max_tokens=1),
            prompt_logprobs=True,
            prompt_logprobs_last_n=prompt_logprobs_last_n,
            record_stability_info=self._record_stability_info,
        )

        async def compute() -> list[float | None]:
            response = await self._sample(request, True)
            if response.prompt_logprobs is None:
                raise TinkerError("the service returned no prompt log-probabilities")
            return response.prompt_logprobs

        return self.holder.submit_future(compute)

    async def compute_logprobs_async(
        self, prompt: ModelInput, prompt_logprobs_last_n: int | None = None
    ) -> list[float | None]:
        return await _or_cancel(self.compute_logprobs(prompt, prompt_logprobs_last_n))

    async def _sample(self, request: SampleRequest, repeats: bool) -> SampleResponse:
        body = request.to_wire()
        with self.holder.spans.span(
            "sample",
            sampling_session_id=self._sampling_session_id,
            num_samples=request.num_samples,
        ):
            if repeats:
                return await self.retry_handler.execute(lambda: self._sample_once(request, body))
            return await self._sample_once(request, body)

    async def _sample_once(self, request: SampleRequest, body: dict[str, Any]) -> SampleResponse:
        """One submission, with a sequence id of its own."""
        if self._clone_id is None:
            await self._join()
        started = time.monotonic()
        numbered = {**body, "seq_id": next(self._seq_ids)}
        poller = self._completion_poller()
        with contextlib.nullcontext() if poller is None else poller.submitting():
            promise = await self._submit(numbered, _estimated_bytes(request.prompt))
        try:
            response = await retrieve(
                self.holder,
                promise,
                sample_kind(promise),
                roundtrip_seconds=time.monotonic() - started,
                observer=self,
                poller=poller,
            )
        except asyncio.CancelledError:
            self.holder.cancel_sample(promise.request_id)
            raise
        check_answers(request, response)
        return response

    async def _submit(self, body: dict[str, Any], num_bytes: int) -> UntypedAPIFuture:
        """Send, and send again under the same id while the service asks the client to wait."""
        gate = self.holder.sample_gate
        async with gate.admit(num_bytes):
            return await self.holder.api.call(
                endpoints.SAMPLE,
                wire_json.encode(body),
                headers={"X-Tinker-Sampling-Backpressure": "1"},
                retry=self._submit_policy(num_bytes),
            )

    def _submit_policy(self, num_bytes: int) -> RetryPolicy:
        gate = self.holder.sample_gate.for_size(num_bytes)
        return replace(self.retry_handler.submit_policy, gate=gate)

    async def _join(self) -> None:
        """Have the service number this copy of the client."""
        async with self._joining:
            if self._clone_id is not None:
                return
            joined = await self.holder.api.call(
                endpoints.JOIN_SAMPLING_SESSION,
                JoinSamplingSessionRequest(sampling_session_id=self._sampling_session_id),
            )
            self._seq_ids = itertools.count(joined.client_counter * CLONE_BLOCK)
            self._clone_id = joined.client_counter

    def _completion_poller(self) -> CompletionPoller | None:
        if not self.holder.get_client_config().sample_use_retrieve_futures:
            return None
        if self._poller is None:
            assert self._clone_id is not None, "joined before the first sample"
            self._poller = CompletionPoller(
                self.holder.api, self._sampling_session_id, self._clone_id, self.holder.keep_task
            )
            weakref.finalize(
                self, _close_poller, self.holder.get_loop(), self._poller
            ).atexit = False
        return self._poller

    # --- about the sampler --------------------------------------------------------------------

    def get_base_model(self) -> str:
        """The name of the model that the weights belong to."""
        return self._sampler().result().base_model

    async def get_base_model_async(self) -> str:
        return (await self._sampler()).base_model

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer. It encodes text as it is: no chat template is applied."""
        sampler = self._sampler().result()
        return tokenizers.of_model(self.holder, sampler.base_model, sampler.tokenizer_id)

    def get_telemetry(self) -> Telemetry | None:
        """What reports errors to the service; None if that is switched off."""
        return self.holder.get_telemetry()

    def on_queue_state_change(
        self, queue_state: QueueState, queue_state_reason: str | None
    ) -> None:
        """Called when the service says that samples wait; the default logs it now and then."""
        self._observer.on_queue_state_change(queue_state, queue_state_reason)

    def _sampler(self) -> AwaitableConcurrentFuture[SamplerInfo]:
        return self.holder.submit(
            self.holder.api.call,
            endpoints.GET_SAMPLER.at(sampler_id=self._sampling_session_id),
            None,
        )

    # --- in other processes -------------------------------------------------------------------

    def release_when_dropped(self) -> None:
        """Have the service delete these unnamed weights when this client, the only one that knows
        them, is dropped. One that was pickled or has given a handle away is not the only one:
        then they stay until the session ends."""
        release = self.holder.release_sampler
        self._release = weakref.finalize(self, release, self._sampling_session_id)
        self._release.atexit = False  # the session ends with the program

    def _is_not_the_only_one(self) -> None:
        if self._release is not None:
            self._release.detach()

    def get_sampler_handle(self) -> str:
        """A string from which any process can make a client for the same weights.

        It holds no credential: the other process uses its own.
        """
        self._is_not_the_only_one()
        state = {
            "session_id": self.holder.get_session_id(),
            "sampling_session_id": self._sampling_session_id,
            "holder": share(self.holder).without_credentials().as_dict(),
            "record_stability_info": self._record_stability_info,
        }
        return base64.urlsafe_b64encode(orjson.dumps(state)).decode()

    @staticmethod
    def from_sampler_handle(handle: str, *, api_key: str | None = None) -> SamplingClient:
        """A client for the weights behind a handle, with this process's credential or `api_key`."""
        try:
            state = orjson.loads(base64.urlsafe_b64decode(handle))
            shared = replace(SharedUplink(**state["holder"]), api_key=api_key)
            return _rebuild(
                state["session_id"],
                state["sampling_session_id"],
                shared,
                bool(state.get("record_stability_info", False)),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ValidationError(f"not a sampler handle: {error}") from error

    def __reduce__(self) -> tuple[Any, ...]:
        self._is_not_the_only_one()
        return _rebuild, (
            self.holder.get_session_id(),
            self._sampling_session_id,
            share(self.holder),
            self._record_stability_info,
        )


def _rebuild(
    session_id: str, sampling_session_id: str, shared: SharedUplink, record_stability_info: bool
) -> SamplingClient:
    return SamplingClient(
        UPLINKS.shadow(session_id, shared),
        sampling_session_id=sampling_session_id,
        shadow=True,
        record_stability_info=record_stability_info,
    )


async def _open_sampling_session(
    holder: Uplink, seq_id: int, model_path: str | None, base_model: str | None
) -> str:
    created = await holder.api.call(
        endpoints.CREATE_SAMPLING_SESSION,
        CreateSamplingSessionRequest(
            session_id=holder.get_session_id(),
            sampling_session_seq_id=seq_id,
            base_model=base_model,
            model_path=model_path,
        ),
    )
    return created.sampling_session_id


def _close_poller(loop: asyncio.AbstractEventLoop, poller: CompletionPoller) -> None:
    with contextlib.suppress(RuntimeError):  # the loop may be gone at interpreter exit
        loop.call_soon_threadsafe(poller.close)


async def _or_cancel(future: Future[T]) -> T:
    """A sample that nobody waits for is not worth finishing."""
    try:
        return await AwaitableConcurrentFuture(future)
    except asyncio.CancelledError:
        future.cancel()
        raise


def _estimated_bytes(prompt: ModelInput) -> int:
    return sum(
        chunk.length * _BYTES_PER_TOKEN if isinstance(chunk, EncodedTextChunk) else chunk.nbytes
        for chunk in prompt.chunks
    )
