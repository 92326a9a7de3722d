"""ServiceClient: the way in. It makes training, sampling and REST clients of one credential."""

from __future__ import annotations

import dataclasses
import threading
import warnings
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal, Self

from tinsmith.client.calls import creation, custom_loss
from tinsmith.client.calls.custom_loss import LossHandle, PerDatumLossFn
from tinsmith.client.calls.operation import operate
from tinsmith.client.futures import APIFuture, AwaitableConcurrentFuture, resolved
from tinsmith.client.rest import RestClient
from tinsmith.client.results.retries import RetryConfig
from tinsmith.client.sampling import SamplingClient
from tinsmith.client.training import TrainingClient
from tinsmith.client.twins import documented_twins
from tinsmith.client.uplink.loop import submit
from tinsmith.client.uplink.stats import ClassStats
from tinsmith.client.uplink.telemetry import Telemetry
from tinsmith.client.uplink.uplink import NewSession, Uplink
from tinsmith.client.warn import warns
from tinsmith.errors import ClosedError
from tinsmith.transport.config import ClientConfig
from tinsmith.transport.retry import NO_RETRY, RetryPolicy
from tinsmith.types import (
    CreateCustomLossRequest,
    CustomLossInputRank,
    FinishSessionRequest,
    GetServerCapabilitiesResponse,
    LoraConfig,
    OptimizerConfig,
)
from tinsmith.types.console import console_of, session_console_url
from tinsmith.wire import endpoints

FinishStatus = Literal["success", "errored", "interrupted"]

_NO_REST_CLIENT = (
    "ServiceClient.create_rest_client() is deprecated: make a tinsmith.RestClient(), which takes "
    "the same base_url and api_key"
)


@documented_twins
class ServiceClient:
    """A service, seen with one credential.

        with tinsmith.ServiceClient() as service:
            training = service.create_lora_training_client("Qwen/Qwen3-8B")

    Making one sends no request. The first client it makes opens a session, which `close` (or the
    end of the `with` block) finishes. `config` replaces all that is otherwise read from the
    arguments and the environment.
    """

    def __init__(
        self,
        user_metadata: dict[str, str] | None = None,
        project_id: str | None = None,
        *,
        display_name: str | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        default_headers_overrides: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        config = kwargs.pop("config", None)
        if kwargs:
            warnings.warn(
                f"ServiceClient ignores unknown arguments: {', '.join(sorted(kwargs))}",
                FutureWarning,
                stacklevel=2,
            )
        self.config: ClientConfig = config or ClientConfig.from_env(
            base_url=base_url,
            api_key=api_key,
            project_id=project_id,
            headers=default_headers_overrides,
        )
        self._plan = NewSession(user_metadata=user_metadata, display_name=display_name)
        self._lock = threading.Lock()
        self._session: Uplink | None = None
        self._rest: Uplink | None = None
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<ServiceClient of {self.config.base_url}>"

    # --- lifecycle ----------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(_status_after(exc_type)).result()

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close(_status_after(exc_type))

    def close(
        self, status: FinishStatus, detail: str | None = None
    ) -> AwaitableConcurrentFuture[None]:
        """Finish the session and release everything; a second time does nothing.

        The clients made by this one cannot be used afterwards.
        """
        with self._lock:
            if self._is_closed:
                return resolved(None)
            self._is_closed = True
            session, rest = self._session, self._rest
        if session is None and rest is None:
            return resolved(None)

        async def close() -> None:
            try:
                if session is not None and session.is_open:
                    await _finish(session, status, detail)
            finally:
                for uplink in (session, rest):
                    if uplink is not None:
                        await uplink.aclose()

        return AwaitableConcurrentFuture(submit(close()))

    @property
    def holder(self) -> Uplink:
        """The session's uplink, opened if it is not; under its official name."""
        return self._session_uplink().open()

    def stats(self) -> Mapping[str, ClassStats]:
        """How many requests were made and how long they took, per connection class.

        Counted here, sent nowhere.
        """
        return self._session_uplink().api.stats.current()

    def session_has_ended(self) -> bool:
        """Ask the service whether it has ended the session, for example after hours of silence.

        Clients of an ended session are of no further use; the next one made opens a new session.
        """
        session = self._session
        return session is not None and session.submit(session.check_session).result()

    def get_telemetry(self) -> Telemetry | None:
        """What reports errors to the service; None if that is switched off."""
        uplink = self._session or self._rest
        return None if uplink is None else uplink.get_telemetry()

    def get_console_url(self) -> str:
        """This session in the web console of the service."""
        console = console_of(self.config.base_url)
        if self._session is None or not self._session.is_open:
            return f"{console}/sessions"
        return session_console_url(self._session.get_session_id(), console)

    # --- what the service offers --------------------------------------------------------------

    def get_server_capabilities(self) -> GetServerCapabilitiesResponse:
        """The models that can be trained and sampled."""
        return self._capabilities().result()

    async def get_server_capabilities_async(self) -> GetServerCapabilitiesResponse:
        return await self._capabilities()

    def _capabilities(
        self, retry: RetryPolicy | None = None
    ) -> AwaitableConcurrentFuture[GetServerCapabilitiesResponse]:
        uplink = self._rest_uplink()
        return uplink.submit(uplink.api.call, endpoints.GET_SERVER_CAPABILITIES, None, retry=retry)

    def check_accessible(self) -> None:
        """Send one request, without retries; raise what is wrong with the credential or the
        service."""
        self._capabilities(retry=NO_RETRY).result()

    # --- training clients ---------------------------------------------------------------------

    def create_lora_training_client(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: dict[str, str] | None = None,
        optimizer: OptimizerConfig | None = None,
    ) -> TrainingClient:
        """A new adapter of `rank` on a base model, to be trained with AdamW or `optimizer`.

        `seed` fixes its initial weights; the flags choose which matrices it changes.
        """
        return self._create_model(
            base_model, rank, seed, train_mlp, train_attn, train_unembed, user_metadata, optimizer
        ).result()

    async def create_lora_training_client_async(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: dict[str, str] | None = None,
        optimizer: OptimizerConfig | None = None,
    ) -> TrainingClient:
        return await self._create_model(
            base_model, rank, seed, train_mlp, train_attn, train_unembed, user_metadata, optimizer
        )

    def create_training_client_from_state(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
        optimizer: OptimizerConfig | None = None,
    ) -> TrainingClient:
        """A new run from the weights of a checkpoint, with a fresh optimizer.

        `weights_access_token` opens a checkpoint of another account.
        """
        return self._resume(
            path, base_model, user_metadata, weights_access_token, optimizer, False
        ).result()

    async def create_training_client_from_state_async(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
        optimizer: OptimizerConfig | None = None,
    ) -> TrainingClient:
        return await self._resume(
            path, base_model, user_metadata, weights_access_token, optimizer, False
        )

    def create_training_client_from_state_with_optimizer(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
    ) -> TrainingClient:
        """A new run that goes on exactly where the checkpoint was saved."""
        return self._resume(
            path, base_model, user_metadata, weights_access_token, None, True
        ).result()

    async def create_training_client_from_state_with_optimizer_async(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
    ) -> TrainingClient:
        return await self._resume(path, base_model, user_metadata, weights_access_token, None, True)

    def _create_model(
        self,
        base_model: str,
        rank: int,
        seed: int | None,
        train_mlp: bool,
        train_attn: bool,
        train_unembed: bool,
        user_metadata: dict[str, str] | None,
        optimizer: OptimizerConfig | None,
    ) -> AwaitableConcurrentFuture[TrainingClient]:
        if not (train_mlp or train_attn or train_unembed):
            raise ValueError("at least one of train_mlp, train_attn and train_unembed must be true")
        lora = LoraConfig(
            rank=rank,
            seed=seed,
            train_mlp=train_mlp,
            train_attn=train_attn,
            train_unembed=train_unembed,
        )
        uplink = self._session_uplink()
        return uplink.submit(
            creation.create,
            uplink,
            uplink.next_model_seq_id(),
            base_model,
            lora,
            user_metadata,
            optimizer,
        )

    def _resume(
        self,
        path: str,
        base_model: str | None,
        user_metadata: dict[str, str] | None,
        token: str | None,
        optimizer: OptimizerConfig | None,
        with_optimizer: bool,
    ) -> AwaitableConcurrentFuture[TrainingClient]:
        uplink = self._session_uplink()
        return uplink.submit(
            creation.resume,
            uplink,
            path,
            base_model,
            user_metadata,
            token,
            optimizer,
            with_optimizer,
        )

    # --- sampling clients, losses, copies -----------------------------------------------------

    def create_sampling_client(
        self,
        model_path: str | None = None,
        base_model: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> SamplingClient:
        """A client that samples from saved weights or from a base model."""
        return self._sampling(model_path, base_model, retry_config, record_stability_info).result()

    async def create_sampling_client_async(
        self,
        model_path: str | None = None,
        base_model: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> SamplingClient:
        return await self._sampling(model_path, base_model, retry_config, record_stability_info)

    def _sampling(
        self,
        model_path: str | None,
        base_model: str | None,
        retry_config: RetryConfig | None,
        record_stability_info: bool,
    ) -> APIFuture[SamplingClient]:
        if model_path is None and base_model is None:
            raise ValueError("give model_path or base_model")
        return SamplingClient.create(
            self._session_uplink(),
            model_path=model_path,
            base_model=base_model,
            retry_config=retry_config,
            record_stability_info=record_stability_info,
        )

    def create_custom_loss(
        self, fn: PerDatumLossFn, input_ranks: Mapping[str, CustomLossInputRank]
    ) -> APIFuture[LossHandle]:
        """Trace a per-datum loss for `TrainingClient.forward_backward_custom`.

        `fn(logprobs, *inputs)` returns a scalar loss and a dict of scalar metrics called
        `custom/<name>:sum` or `:mean`. `input_ranks` gives the rank of each parameter. Where the
        service can run it, it is uploaded; otherwise it runs here, under the same rules.
        """
        uplink = self.holder
        handle = custom_loss.trace(fn, input_ranks, uplink.get_session_id())
        known = uplink.custom_losses.setdefault(handle.key, handle)
        if known is not handle:
            raise ValueError(
                f"this session already has the same loss, called {known.name!r}; use its handle"
            )
        if not uplink.get_client_config().custom_loss_server_side:
            return resolved(handle)
        request = CreateCustomLossRequest(
            session_id=uplink.get_session_id(),
            custom_loss_seq_id=uplink.next_custom_loss_seq_id(),
            name=handle.name,
            inputs=list(handle.inputs),
            graph=custom_loss.encode(handle),
        )

        async def upload() -> LossHandle:
            created = await operate(uplink, endpoints.CREATE_CUSTOM_LOSS, request)
            return dataclasses.replace(handle, loss_id=created.loss_id)

        return uplink.submit(upload)

    def copy_weights(
        self, path: str, *, ttl_seconds: int | None = None, weights_access_token: str | None = None
    ) -> AwaitableConcurrentFuture[str]:
        """Copy a checkpoint into this client's project; the result is the copy's tinker path."""
        return RestClient(self._rest_uplink()).copy_weights(
            path,
            self.config.project_id,
            ttl_seconds=ttl_seconds,
            weights_access_token=weights_access_token,
        )

    @warns(_NO_REST_CLIENT, FutureWarning)
    def create_rest_client(self) -> RestClient:
        """Deprecated: make a `RestClient`."""
        return RestClient(self._rest_uplink())

    # --- uplinks ------------------------------------------------------------------------------

    def _session_uplink(self) -> Uplink:
        with self._lock:
            self._check_open()
            if self._session is None or self._session.has_ended:
                # Clients of the ended session are of no use any more; new ones get a new session.
                self._session = Uplink(self.config, session=self._plan)
            return self._session

    def _rest_uplink(self) -> Uplink:
        """The session's uplink if there is one, otherwise one without a session."""
        with self._lock:
            self._check_open()
            if self._session is not None:
                return self._session
            if self._rest is None:
                self._rest = Uplink(self.config)
            return self._rest

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("ServiceClient is closed; create a new one")


def _status_after(error: type[BaseException] | None) -> FinishStatus:
    """How a `with` block ended."""
    if error is None:
        return "success"
    return "errored" if issubclass(error, Exception) else "interrupted"


async def _finish(uplink: Uplink, status: FinishStatus, detail: str | None) -> None:
    await uplink.api.send(
        endpoints.FINISH_SESSION.at(session_id=uplink.get_session_id()),
        FinishSessionRequest(reason={"type": status}, detail=detail),  # type: ignore[arg-type]  # read as one of the reasons
    )
