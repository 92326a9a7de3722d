"""TrainingClient: the operations on one model, in the order in which they are called."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Literal, TypeVar

from tinsmith.client import run_log, tokenizers
from tinsmith.client.calls import custom_loss
from tinsmith.client.calls.custom_loss import CustomLossFn, LossHandle
from tinsmith.client.calls.operation import operate
from tinsmith.client.calls.passes import Passes
from tinsmith.client.calls.turns import Turns
from tinsmith.client.futures import APIFuture, AwaitableConcurrentFuture, explain_blocking
from tinsmith.client.results.queue_state import QueueStateLogger
from tinsmith.client.results.retries import RetryConfig
from tinsmith.client.sampling import SamplingClient
from tinsmith.client.twins import documented_twins
from tinsmith.client.uplink.telemetry import Telemetry
from tinsmith.client.uplink.uplink import Uplink
from tinsmith.client.warn import warns
from tinsmith.errors import TinkerError
from tinsmith.types import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    GetInfoRequest,
    GetInfoResponse,
    LoadWeightsRequest,
    LoadWeightsResponse,
    LossFnType,
    ModelID,
    OptimParams,
    OptimParamsBase,
    OptimStepRequest,
    OptimStepResponse,
    SaveWeightsExternalRequest,
    SaveWeightsExternalResponse,
    SaveWeightsExternalResponseInternal,
    SaveWeightsForSamplerRequest,
    SaveWeightsForSamplerResponse,
    SaveWeightsForSamplerResponseInternal,
    SaveWeightsRequest,
    SaveWeightsResponse,
)
from tinsmith.types.console import console_of, training_run_console_url
from tinsmith.types.model import Model
from tinsmith.types.observing import PostMetricsRequest
from tinsmith.wire import endpoints
from tinsmith.wire.endpoints import Endpoint, Promised

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
M = TypeVar("M", bound=Model)
Result = TypeVar("Result")

_LOAD_STATE = (
    "TrainingClient.load_state*() is deprecated: create a new training client from the checkpoint "
    "with ServiceClient.create_training_client_from_state[_with_optimizer]()"
)
_UNUSED_NAME = (
    "the 'name' of save_weights_and_get_sampling_client has no effect and will be removed: the "
    "weights are kept for this session only. For a checkpoint that stays, use "
    "save_weights_for_sampler(name) and create_sampling_client(model_path)"
)


@documented_twins
class TrainingClient:
    """One model that is being trained.

    Every method that changes or reads the model takes its place in line when it is called and
    returns a future at once, so a step can be queued behind a pass without waiting for it:

        passed = training.forward_backward(batch, "cross_entropy")
        stepped = training.optim_step(tinsmith.AdamParams(learning_rate=1e-4))
        print(passed.result().metrics, stepped.result().metrics)

    You get one from `ServiceClient.create_lora_training_client()`.
    """

    def __init__(self, holder: Uplink, model_seq_id: int, model_id: ModelID) -> None:
        self.holder = holder
        self.model_id = model_id
        self._turns = Turns()
        self._observer = QueueStateLogger(
            f"Training for {model_id}", "limit of concurrent training clients reached"
        )
        self._passes = Passes(holder, model_id, self._turns, self._observer)
        self._metrics_order = asyncio.Lock()
        run_log.note(self)

    def __repr__(self) -> str:
        return f"<TrainingClient of model {self.model_id!r}>"

    # --- passes -------------------------------------------------------------------------------

    def forward(
        self,
        data: list[Datum],
        loss_fn: LossFnType,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> APIFuture[ForwardBackwardOutput]:
        """Compute the loss and its per-token outputs, and leave no trace in the model."""
        return self._passes.submit(data, loss_fn, loss_fn_config, forward_only=True)

    async def forward_async(
        self,
        data: list[Datum],
        loss_fn: LossFnType,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> APIFuture[ForwardBackwardOutput]:
        return self.forward(data, loss_fn, loss_fn_config)

    def forward_backward(
        self,
        data: list[Datum],
        loss_fn: LossFnType,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> APIFuture[ForwardBackwardOutput]:
        """Compute the loss and add its gradient to what the next `optim_step` will apply."""
        return self._passes.submit(data, loss_fn, loss_fn_config, forward_only=False)

    async def forward_backward_async(
        self,
        data: list[Datum],
        loss_fn: LossFnType,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> APIFuture[ForwardBackwardOutput]:
        return self.forward_backward(data, loss_fn, loss_fn_config)

    def forward_backward_custom(
        self,
        data: list[Datum],
        loss_fn: CustomLossFn | LossHandle,
        *,
        loss_type_input: Literal["logprobs"] | None = None,
    ) -> APIFuture[ForwardBackwardOutput]:
        """`forward_backward` with a loss of your own: `loss_fn(data, logprobs) -> (loss, metrics)`.

        Blocks while the log-probabilities are computed and your function runs, which happens in
        the calling thread. `logprobs` has a tensor per datum, shaped like its `target_tokens`, and
        the loss must depend on each of them. A `LossHandle` that the service runs does not block.
        """
        _check_loss_type_input(loss_type_input)
        if (done := self._server_side(data, loss_fn)) is not None:
            return done
        explain_blocking("forward_backward_custom()", "use forward_backward_custom_async()")
        first = self.forward(custom_loss.forward_data(data), "cross_entropy")
        return self._second_pass(data, first.result(), loss_fn)

    async def forward_backward_custom_async(
        self,
        data: list[Datum],
        loss_fn: CustomLossFn | LossHandle,
        *,
        loss_type_input: Literal["logprobs"] | None = None,
    ) -> APIFuture[ForwardBackwardOutput]:
        _check_loss_type_input(loss_type_input)
        if (done := self._server_side(data, loss_fn)) is not None:
            return done
        first = await self.forward_async(custom_loss.forward_data(data), "cross_entropy")
        return self._second_pass(data, await first, loss_fn)

    def _server_side(
        self, data: list[Datum], loss_fn: CustomLossFn | LossHandle
    ) -> APIFuture[ForwardBackwardOutput] | None:
        """The whole call, if the service can run this loss by itself."""
        custom_loss.import_torch("use a custom loss")
        if not isinstance(loss_fn, LossHandle):
            return None
        if loss_fn.session_id != self.holder.get_session_id():
            raise ValueError(
                f"loss {loss_fn.name!r} was created in session {loss_fn.session_id} and can only "
                "be used by clients of that session"
            )
        custom_loss.check_inputs(loss_fn, data)
        if loss_fn.loss_id is None:
            return None
        return self.forward_backward(data, "custom", {"loss_id": loss_fn.loss_id})

    def _second_pass(
        self, data: list[Datum], output: ForwardBackwardOutput, loss_fn: CustomLossFn | LossHandle
    ) -> APIFuture[ForwardBackwardOutput]:
        second, loss, metrics = custom_loss.gradients(data, output, loss_fn)
        passed = self.forward_backward(second, "cross_entropy")
        return AwaitableConcurrentFuture(passed.future()).map(
            lambda result: custom_loss.with_custom_metrics(result, loss, metrics)
        )

    # --- steps, saving and loading ------------------------------------------------------------

    def optim_step(
        self, optim_params: OptimParams | None = None, *, adam_params: AdamParams | None = None
    ) -> APIFuture[OptimStepResponse]:
        """Apply the gathered gradients with the optimizer the model was created with.

        `adam_params` is the old name of `optim_params`; give one of them.
        """
        if optim_params is not None and adam_params is not None:
            raise ValueError("give optim_params or adam_params, not both")
        params = adam_params if optim_params is None else optim_params
        if not isinstance(params, (AdamParams, OptimParamsBase)):
            raise TypeError(
                f"optim_step needs AdamParams, DimuonParams or such, got {type(params).__name__}"
            )
        return self._operate(
            endpoints.OPTIM_STEP,
            OptimStepRequest(optim_params=params, model_id=self.model_id),
        )

    async def optim_step_async(
        self, optim_params: OptimParams | None = None, *, adam_params: AdamParams | None = None
    ) -> APIFuture[OptimStepResponse]:
        return self.optim_step(optim_params, adam_params=adam_params)

    def save_state(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: dict[str, str] | None = None,
    ) -> APIFuture[SaveWeightsResponse]:
        """Save the full training state under `name`; the result has its tinker path.

        `overwrite` replaces a checkpoint of that name together with its metadata.
        """
        return self._operate(
            endpoints.SAVE_WEIGHTS,
            SaveWeightsRequest(
                model_id=self.model_id,
                path=name,
                ttl_seconds=ttl_seconds,
                overwrite=overwrite,
                user_metadata=user_metadata,
            ),
        )

    async def save_state_async(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: dict[str, str] | None = None,
    ) -> APIFuture[SaveWeightsResponse]:
        return self.save_state(
            name, ttl_seconds=ttl_seconds, overwrite=overwrite, user_metadata=user_metadata
        )

    @warns(_LOAD_STATE, FutureWarning)
    def load_state(
        self, path: str, weights_access_token: str | None = None
    ) -> APIFuture[LoadWeightsResponse]:
        """Load weights, and start with a fresh optimizer."""
        return load_weights(self, path, False, weights_access_token)

    @warns(_LOAD_STATE, FutureWarning)
    async def load_state_async(
        self, path: str, weights_access_token: str | None = None
    ) -> APIFuture[LoadWeightsResponse]:
        return load_weights(self, path, False, weights_access_token)

    @warns(_LOAD_STATE, FutureWarning)
    def load_state_with_optimizer(
        self, path: str, weights_access_token: str | None = None
    ) -> APIFuture[LoadWeightsResponse]:
        """Load weights and optimizer state."""
        return load_weights(self, path, True, weights_access_token)

    @warns(_LOAD_STATE, FutureWarning)
    async def load_state_with_optimizer_async(
        self, path: str, weights_access_token: str | None = None
    ) -> APIFuture[LoadWeightsResponse]:
        return load_weights(self, path, True, weights_access_token)

    def save_weights_for_sampler(
        self, name: str, ttl_seconds: int | None = None, user_metadata: dict[str, str] | None = None
    ) -> APIFuture[SaveWeightsForSamplerResponse]:
        """Freeze the weights under `name` for sampling; the result has their tinker path."""

        def public(saved: SaveWeightsForSamplerResponseInternal) -> SaveWeightsForSamplerResponse:
            return SaveWeightsForSamplerResponse(path=_needed(saved.path, "path"))

        return self._operate(
            endpoints.SAVE_WEIGHTS_FOR_SAMPLER,
            SaveWeightsForSamplerRequest(
                model_id=self.model_id,
                path=name,
                ttl_seconds=ttl_seconds,
                user_metadata=user_metadata,
            ),
        ).map(public)

    async def save_weights_for_sampler_async(
        self, name: str, ttl_seconds: int | None = None, user_metadata: dict[str, str] | None = None
    ) -> APIFuture[SaveWeightsForSamplerResponse]:
        return self.save_weights_for_sampler(
            name, ttl_seconds=ttl_seconds, user_metadata=user_metadata
        )

    def save_weights_external(
        self,
        name: str,
        ttl_seconds: int | None = None,
        age_encryption_recipients: list[str] | None = None,
    ) -> APIFuture[SaveWeightsExternalResponse]:
        """Export the weights as plain files; with recipients, each file encrypted to them."""

        def public(saved: SaveWeightsExternalResponseInternal) -> SaveWeightsExternalResponse:
            return SaveWeightsExternalResponse(path=_needed(saved.path, "path"))

        return self._operate(
            endpoints.SAVE_WEIGHTS_EXTERNAL,
            SaveWeightsExternalRequest(
                model_id=self.model_id,
                path=name,
                ttl_seconds=ttl_seconds,
                age_encryption_recipients=age_encryption_recipients,
            ),
        ).map(public)

    async def save_weights_external_async(
        self,
        name: str,
        ttl_seconds: int | None = None,
        age_encryption_recipients: list[str] | None = None,
    ) -> APIFuture[SaveWeightsExternalResponse]:
        return self.save_weights_external(
            name, ttl_seconds=ttl_seconds, age_encryption_recipients=age_encryption_recipients
        )

    # --- sampling from the model --------------------------------------------------------------

    def save_weights_and_get_sampling_client(
        self,
        name: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> SamplingClient:
        """A client that samples from the weights as they are now, whatever is trained later."""
        if name is not None:
            warnings.warn(_UNUSED_NAME, DeprecationWarning, stacklevel=2)
        return self._frozen_sampler(retry_config, record_stability_info).result()

    async def save_weights_and_get_sampling_client_async(
        self,
        name: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> SamplingClient:
        if name is not None:
            warnings.warn(_UNUSED_NAME, DeprecationWarning, stacklevel=2)
        return await self._frozen_sampler(retry_config, record_stability_info)

    def _frozen_sampler(
        self, retry_config: RetryConfig | None, record_stability_info: bool
    ) -> APIFuture[SamplingClient]:
        sampling_session_seq_id = self.holder.next_sampling_session_seq_id()

        def client(saved: SaveWeightsForSamplerResponseInternal) -> SamplingClient:
            sampler = SamplingClient(
                self.holder,
                sampling_session_id=_needed(saved.sampling_session_id, "sampling_session_id"),
                retry_config=retry_config,
                record_stability_info=record_stability_info,
            )
            sampler.release_when_dropped()
            return sampler

        return self._operate(
            endpoints.SAVE_WEIGHTS_FOR_SAMPLER,
            SaveWeightsForSamplerRequest(
                model_id=self.model_id,
                sampling_session_seq_id=sampling_session_seq_id,
            ),
        ).map(client)

    def create_sampling_client(
        self,
        model_path: str,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> SamplingClient:
        """A client that samples from saved weights."""
        return SamplingClient.create(
            self.holder,
            model_path=model_path,
            retry_config=retry_config,
            record_stability_info=record_stability_info,
        ).result()

    async def create_sampling_client_async(
        self,
        model_path: str,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> SamplingClient:
        return await SamplingClient.create(
            self.holder,
            model_path=model_path,
            retry_config=retry_config,
            record_stability_info=record_stability_info,
        )

    # --- about the model ----------------------------------------------------------------------

    def get_info(self) -> GetInfoResponse:
        """What the service knows about the model: base model, rank, optimizer, tokenizer."""
        return self._info().result()

    async def get_info_async(self) -> GetInfoResponse:
        return await self._info()

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer. It encodes text as it is: no chat template is applied."""
        data = self.get_info().model_data
        name = _needed(data.model_name, "model_data.model_name")
        return tokenizers.of_model(self.holder, name, data.tokenizer_id)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text` as it is, with the special tokens that the tokenizer adds."""
        ids: list[int] = self.get_tokenizer().encode(text)
        return ids

    def decode(self, tokens: list[int]) -> str:
        """The text of token ids."""
        text: str = self.get_tokenizer().decode(tokens)
        return text

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> Future[None]:
        """Add metrics of your own to the run's curves; `tinsmith.log` does it in the background.

        For servers of ours: the hosted service has no such call.
        """
        endpoint = endpoints.POST_RUN_METRICS.at(run_id=self.model_id)
        message = PostMetricsRequest(step=step, metrics=dict(metrics))
        return self.holder.submit_future(self._post_metrics, endpoint, message)

    async def _post_metrics(
        self, endpoint: Endpoint[PostMetricsRequest, None], message: PostMetricsRequest
    ) -> None:
        async with self._metrics_order:
            await self.holder.api.call(endpoint, message)

    def get_console_url(self) -> str:
        """This run in the web console of the service."""
        return training_run_console_url(self.model_id, console_of(self.holder.config.base_url))

    def get_telemetry(self) -> Telemetry | None:
        """What reports errors to the service; None if that is switched off."""
        return self.holder.get_telemetry()

    def _info(self) -> AwaitableConcurrentFuture[GetInfoResponse]:
        return self.holder.submit(
            self.holder.api.call, endpoints.GET_INFO, GetInfoRequest(model_id=self.model_id)
        )

    # --- one operation ------------------------------------------------------------------------

    def _operate(
        self, endpoint: Promised[M, Result], message: M
    ) -> AwaitableConcurrentFuture[Result]:
        """Take the next id, send in turn, fetch the result."""
        ids = self._turns.reserve()
        future = self.holder.submit(
            operate,
            self.holder,
            endpoint,
            message.model_copy(update={"seq_id": ids[0]}),
            observer=self._observer,
            turn=self._turns.take(ids[0]),
        )
        self._turns.release_after(future.future(), ids, self.holder.get_loop())
        return future


def load_weights(
    training: TrainingClient, path: str, with_optimizer: bool, weights_access_token: str | None
) -> APIFuture[LoadWeightsResponse]:
    """Load a checkpoint into a model that exists. For users there is
    `ServiceClient.create_training_client_from_state`, which makes the model, too."""
    return training._operate(
        endpoints.LOAD_WEIGHTS,
        LoadWeightsRequest(
            model_id=training.model_id,
            path=path,
            optimizer=with_optimizer,
            weights_access_token=weights_access_token,
        ),
    )


def _needed(value: T | None, name: str) -> T:
    if value is None:
        raise TinkerError(f"the service's answer lacks {name!r}")
    return value


def _check_loss_type_input(loss_type_input: str | None) -> None:
    if loss_type_input is None:
        return
    warnings.warn(
        "loss_type_input is deprecated: a custom loss always receives logprobs; omit it",
        DeprecationWarning,
        stacklevel=3,
    )
    if loss_type_input != "logprobs":
        raise ValueError(f"unknown loss_type_input {loss_type_input!r}; known: logprobs")
