"""RestClient: looking at and tidying up runs, checkpoints and sessions, without a session."""

from __future__ import annotations

import asyncio
import logging
import uuid
from concurrent.futures import Future
from datetime import date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar, Unpack

from tinsmith.client.downloads.download import download, download_archive
from tinsmith.client.downloads.file import ProgressCallback
from tinsmith.client.futures import APIFuture, AwaitableConcurrentFuture
from tinsmith.client.paging import Pages
from tinsmith.client.sessionless import SessionlessClient
from tinsmith.client.twins import documented_twins
from tinsmith.client.uplink.api import Options
from tinsmith.client.warn import ExperimentalWarning, warns
from tinsmith.errors import TinkerError
from tinsmith.transport.tokens import jwt_claims
from tinsmith.types import (
    AssignSessionProjectRequest,
    AuditLogResponse,
    BillingUsageResponse,
    Checkpoint,
    CheckpointsListResponse,
    CopyWeightsRequest,
    CurrentCheckpointStorageUsageResponse,
    ExternalWeightsUrlsResponse,
    GetSamplerResponse,
    GetSessionResponse,
    ListSessionsResponse,
    ModelID,
    ParsedCheckpointTinkerPath,
    SessionSearchRequest,
    SessionSearchResponse,
    SetCheckpointTtlRequest,
    TrainingRun,
    TrainingRunsResponse,
    WeightsInfoRequest,
    WeightsInfoResponse,
    WhoamiResponse,
)
from tinsmith.wire import endpoints
from tinsmith.wire.endpoints import Endpoint

if TYPE_CHECKING:
    from tinsmith.client.admin import AdminClient

logger = logging.getLogger(__name__)

T = TypeVar("T")
Req = TypeVar("Req")
Resp = TypeVar("Resp")
AccessScope = Literal["owned", "accessible"]
AuditEventType = Literal["all", "checkpoints", "projects", "teams", "organizations"]

_MOVED = (
    "this method of RestClient is deprecated; use AdminClient, which is made with the "
    "same arguments"
)


@documented_twins
class RestClient(SessionlessClient):
    """Runs, checkpoints, sessions, samplers: listing, reading, deleting, publishing, copying.

        rest = tinsmith.RestClient()
        for run in rest.iter_training_runs(): print(run.training_run_id)

    Clients with the same address and key share limits and sockets, which need no closing.
    """

    # --- training runs ------------------------------------------------------------------------

    def get_training_run(
        self, training_run_id: ModelID, access_scope: AccessScope = "owned"
    ) -> Future[TrainingRun]:
        """A run, with its last checkpoints."""
        return self._training_run(training_run_id, access_scope, "get_training_run")

    async def get_training_run_async(
        self, training_run_id: ModelID, access_scope: AccessScope = "owned"
    ) -> TrainingRun:
        return await _result(self.get_training_run(training_run_id, access_scope))

    def get_training_run_by_tinker_path(
        self, tinker_path: str, access_scope: AccessScope = "owned"
    ) -> Future[TrainingRun]:
        """The run that a checkpoint belongs to."""
        run_id = _parsed(tinker_path).training_run_id
        return self._training_run(run_id, access_scope, "get_training_run_by_tinker_path")

    async def get_training_run_by_tinker_path_async(
        self, tinker_path: str, access_scope: AccessScope = "owned"
    ) -> TrainingRun:
        return await _result(self.get_training_run_by_tinker_path(tinker_path, access_scope))

    def list_training_runs(
        self,
        limit: int = 20,
        offset: int = 0,
        access_scope: AccessScope = "owned",
        project_id: str | None = None,
    ) -> Future[TrainingRunsResponse]:
        """Your runs, newest first, a page at a time."""
        query: dict[str, object] = {"limit": limit, "offset": offset, "access_scope": access_scope}
        if project_id is not None:
            query["project_id"] = project_id
        return self._call(
            endpoints.LIST_TRAINING_RUNS, None, sdk_method="list_training_runs", query=query
        ).future()

    async def list_training_runs_async(
        self,
        limit: int = 20,
        offset: int = 0,
        access_scope: AccessScope = "owned",
        project_id: str | None = None,
    ) -> TrainingRunsResponse:
        return await _result(self.list_training_runs(limit, offset, access_scope, project_id))

    def iter_training_runs(
        self,
        page_size: int = 100,
        access_scope: AccessScope = "owned",
        project_id: str | None = None,
    ) -> Pages[TrainingRun]:
        """All runs, fetched page by page as the loop (plain or async) goes on."""
        return Pages(
            lambda offset: AwaitableConcurrentFuture(
                self.list_training_runs(page_size, offset, access_scope, project_id)
            ).map(lambda page: page.training_runs),
            page_size,
        )

    # --- checkpoints --------------------------------------------------------------------------

    def list_checkpoints(self, training_run_id: ModelID) -> Future[CheckpointsListResponse]:
        """All checkpoints of a run."""
        endpoint = endpoints.LIST_RUN_CHECKPOINTS.at(run_id=training_run_id)
        return self._call(endpoint, None, sdk_method="list_checkpoints").future()

    async def list_checkpoints_async(self, training_run_id: ModelID) -> CheckpointsListResponse:
        return await _result(self.list_checkpoints(training_run_id))

    def list_user_checkpoints(
        self, limit: int = 100, offset: int = 0
    ) -> Future[CheckpointsListResponse]:
        """The caller's checkpoints over all runs, newest first."""
        query = {"limit": limit, "offset": offset}
        return self._call(
            endpoints.LIST_CHECKPOINTS, None, sdk_method="list_user_checkpoints", query=query
        ).future()

    async def list_user_checkpoints_async(
        self, limit: int = 100, offset: int = 0
    ) -> CheckpointsListResponse:
        return await _result(self.list_user_checkpoints(limit, offset))

    def iter_checkpoints(self, page_size: int = 100) -> Pages[Checkpoint]:
        """All the caller's checkpoints, fetched page by page as the loop goes on."""
        return Pages(
            lambda offset: AwaitableConcurrentFuture(
                self.list_user_checkpoints(page_size, offset)
            ).map(lambda page: page.checkpoints),
            page_size,
        )

    def get_weights_info_by_tinker_path(self, tinker_path: str) -> APIFuture[WeightsInfoResponse]:
        """Base model, rank and optimizer of a checkpoint."""
        return self._call(
            endpoints.WEIGHTS_INFO,
            WeightsInfoRequest(tinker_path=tinker_path),
            sdk_method="get_weights_info_by_tinker_path",
        )

    def get_external_weights_urls(self, tinker_path: str) -> Future[ExternalWeightsUrlsResponse]:
        """Where each file of an external checkpoint can be fetched, and until when."""
        parsed = _parsed(tinker_path)
        if parsed.checkpoint_type != "external":
            raise ValueError(
                "only external checkpoints have files to fetch "
                f"(tinker://<run>/external_weights/<name>), got {tinker_path!r}"
            )
        endpoint = _at(endpoints.EXTERNAL_WEIGHTS_URLS, parsed)
        return self._call(endpoint, None, sdk_method="get_external_weights_urls").future()

    async def get_external_weights_urls_async(
        self, tinker_path: str
    ) -> ExternalWeightsUrlsResponse:
        return await _result(self.get_external_weights_urls(tinker_path))

    def download_checkpoint(
        self, tinker_path: str, folder: str | Path, on_progress: ProgressCallback | None = None
    ) -> AwaitableConcurrentFuture[list[Path]]:
        """Fetch the files of a checkpoint into a folder; the result is where they are.

        An external checkpoint comes file by file, any other as an archive, if the service has one.
        The folder appears when everything is there, and must not have had files before. A
        download that broke off is continued, unless the checkpoint was overwritten meanwhile.
        `on_progress` is called on the I/O thread.
        """
        parsed = _parsed(tinker_path)
        target = Path(folder)
        if parsed.checkpoint_type == "external":

            async def sign() -> ExternalWeightsUrlsResponse:
                return await AwaitableConcurrentFuture(self.get_external_weights_urls(tinker_path))

            async def fetch() -> list[Path]:
                return await download(self.holder, tinker_path, sign, target, on_progress)
        else:
            endpoint = _at(endpoints.ARCHIVE, parsed)
            archive = self._call(endpoint, None, sdk_method="get_checkpoint_archive_url")

            async def fetch() -> list[Path]:
                url = (await archive).url
                return await download_archive(self.holder, tinker_path, url, target, on_progress)

        return self.holder.submit(fetch)

    def delete_checkpoint(self, training_run_id: ModelID, checkpoint_id: str) -> Future[None]:
        """Delete a checkpoint of a run for good, as in `weights/0001`."""
        kind, _, name = checkpoint_id.partition("/")
        endpoint = endpoints.DELETE_CHECKPOINT.at(run_id=training_run_id, kind=kind, name=name)
        return self._call(endpoint, None, sdk_method="delete_checkpoint").future()

    async def delete_checkpoint_async(self, training_run_id: ModelID, checkpoint_id: str) -> None:
        await _result(self.delete_checkpoint(training_run_id, checkpoint_id))

    def delete_checkpoint_from_tinker_path(self, tinker_path: str) -> Future[None]:
        """Delete a checkpoint for good."""
        endpoint = _at(endpoints.DELETE_CHECKPOINT, _parsed(tinker_path))
        return self._call(endpoint, None, sdk_method="delete_checkpoint_from_tinker_path").future()

    async def delete_checkpoint_from_tinker_path_async(self, tinker_path: str) -> None:
        await _result(self.delete_checkpoint_from_tinker_path(tinker_path))

    def publish_checkpoint_from_tinker_path(self, tinker_path: str) -> Future[None]:
        """Let everybody read it."""
        endpoint = _at(endpoints.PUBLISH, _parsed(tinker_path))
        return self._call(endpoint, None, sdk_method="publish_checkpoint_from_tinker_path").future()

    async def publish_checkpoint_from_tinker_path_async(self, tinker_path: str) -> None:
        await _result(self.publish_checkpoint_from_tinker_path(tinker_path))

    def unpublish_checkpoint_from_tinker_path(self, tinker_path: str) -> Future[None]:
        """Make a published checkpoint private again."""
        endpoint = _at(endpoints.UNPUBLISH, _parsed(tinker_path))
        return self._call(
            endpoint, None, sdk_method="unpublish_checkpoint_from_tinker_path"
        ).future()

    async def unpublish_checkpoint_from_tinker_path_async(self, tinker_path: str) -> None:
        await _result(self.unpublish_checkpoint_from_tinker_path(tinker_path))

    def set_checkpoint_ttl_from_tinker_path(
        self, tinker_path: str, ttl_seconds: int | None
    ) -> Future[None]:
        """Set when it expires, in seconds from now; None: never."""
        return self._call(
            _at(endpoints.SET_TTL, _parsed(tinker_path)),
            SetCheckpointTtlRequest(ttl_seconds=ttl_seconds),
            sdk_method="set_checkpoint_ttl_from_tinker_path",
        ).future()

    async def set_checkpoint_ttl_from_tinker_path_async(
        self, tinker_path: str, ttl_seconds: int | None
    ) -> None:
        await _result(self.set_checkpoint_ttl_from_tinker_path(tinker_path, ttl_seconds))

    def copy_weights(
        self,
        path: str,
        destination_project_id: str | None = None,
        *,
        ttl_seconds: int | None = None,
        weights_access_token: str | None = None,
    ) -> AwaitableConcurrentFuture[str]:
        """Copy a checkpoint into a project; the result is the copy's tinker path."""
        project_id = destination_project_id or self.holder.config.project_id
        if project_id is None:
            raise ValueError("give destination_project_id or set TINKER_PROJECT_ID")
        headers = {"X-Idempotency-Key": str(uuid.uuid4())}
        if weights_access_token is not None:
            headers["X-Tinker-Weights-Access-Token"] = weights_access_token
        return self._call(
            endpoints.COPY_WEIGHTS,
            CopyWeightsRequest(
                source_path=path, destination_project_id=project_id, ttl_seconds=ttl_seconds
            ),
            sdk_method="copy_weights",
            headers=headers,
        ).map(lambda copied: copied.tinker_path)

    async def copy_weights_async(
        self,
        path: str,
        destination_project_id: str | None = None,
        *,
        ttl_seconds: int | None = None,
        weights_access_token: str | None = None,
    ) -> str:
        return await self.copy_weights(
            path,
            destination_project_id,
            ttl_seconds=ttl_seconds,
            weights_access_token=weights_access_token,
        )

    # --- sessions and samplers ----------------------------------------------------------------

    def get_session(
        self, session_id: str, access_scope: AccessScope = "owned"
    ) -> Future[GetSessionResponse]:
        """The runs and samplers of a session."""
        query = {"access_scope": access_scope}
        endpoint = endpoints.GET_SESSION.at(session_id=session_id)
        return self._call(endpoint, None, sdk_method="get_session", query=query).future()

    async def get_session_async(
        self, session_id: str, access_scope: AccessScope = "owned"
    ) -> GetSessionResponse:
        return await _result(self.get_session(session_id, access_scope))

    def list_sessions(
        self, limit: int = 20, offset: int = 0, access_scope: AccessScope = "owned"
    ) -> Future[ListSessionsResponse]:
        """The ids of your sessions, newest first, a page at a time."""
        query = {"limit": limit, "offset": offset, "access_scope": access_scope}
        return self._call(
            endpoints.LIST_SESSIONS, None, sdk_method="list_sessions", query=query
        ).future()

    async def list_sessions_async(
        self, limit: int = 20, offset: int = 0, access_scope: AccessScope = "owned"
    ) -> ListSessionsResponse:
        return await _result(self.list_sessions(limit, offset, access_scope))

    def iter_sessions(
        self, page_size: int = 100, access_scope: AccessScope = "owned"
    ) -> Pages[str]:
        """The ids of all sessions, fetched page by page as the loop goes on."""
        return Pages(
            lambda offset: AwaitableConcurrentFuture(
                self.list_sessions(page_size, offset, access_scope)
            ).map(lambda page: page.sessions),
            page_size,
        )

    @warns("RestClient.search_sessions may change or go away in any release", ExperimentalWarning)
    def search_sessions(self, request: SessionSearchRequest) -> Future[SessionSearchResponse]:
        """The organization's sessions that fit, newest first."""
        return self._search_sessions(request)

    @warns("RestClient.search_sessions may change or go away in any release", ExperimentalWarning)
    async def search_sessions_async(self, request: SessionSearchRequest) -> SessionSearchResponse:
        return await _result(self._search_sessions(request))

    def _search_sessions(self, request: SessionSearchRequest) -> Future[SessionSearchResponse]:
        return self._call(endpoints.SEARCH_SESSIONS, request, sdk_method="search_sessions").future()

    def assign_session_project(self, session_id: str, project_id: str) -> Future[None]:
        """Move a session to a project."""
        return self._call(
            endpoints.ASSIGN_PROJECT.at(session_id=session_id),
            AssignSessionProjectRequest(project_id=project_id),
            sdk_method="assign_session_project",
        ).future()

    async def assign_session_project_async(self, session_id: str, project_id: str) -> None:
        await _result(self.assign_session_project(session_id, project_id))

    def export_session_trace(self, session_id: str) -> Future[str]:
        """Have the session's timeline written as a Perfetto trace; the result is its address."""

        async def export() -> str:
            is_first = True
            while True:
                trace = await self.holder.api.call(
                    endpoints.TRACE_EXPORT.at(session_id=session_id),
                    None,
                    sdk_method="export_session_trace",
                )
                if trace.status == "ready" and trace.url is not None:
                    return trace.url
                if trace.status == "failed":
                    raise TinkerError(f"no trace of session {session_id}: {trace.error}")
                if is_first:
                    logger.warning(
                        "Writing the trace of session %s; this may take a while.", session_id
                    )
                    is_first = False
                await asyncio.sleep(self.holder.config.timing.trace_seconds)

        return self.holder.submit(export).future()

    async def export_session_trace_async(self, session_id: str) -> str:
        return await _result(self.export_session_trace(session_id))

    def get_sampler(self, sampler_id: str) -> APIFuture[GetSamplerResponse]:
        """The base model and the weights of a sampler."""
        endpoint = endpoints.GET_SAMPLER.at(sampler_id=sampler_id)
        return self._call(endpoint, None, sdk_method="get_sampler").map(
            # Without the tokenizer's location, which is not part of the protocol.
            lambda info: GetSamplerResponse(
                sampler_id=info.sampler_id, base_model=info.base_model, model_path=info.model_path
            )
        )

    async def get_sampler_async(self, sampler_id: str) -> GetSamplerResponse:
        return await self.get_sampler(sampler_id)

    def whoami(self) -> APIFuture[WhoamiResponse]:
        """Who the credential belongs to, read from its token."""

        async def identify() -> WhoamiResponse:
            token = await self.holder.identity_token()
            if token is None:
                raise TinkerError(
                    "whoami needs a token that says who you are; the service gives none for a key"
                )
            claims = jwt_claims(token)
            return WhoamiResponse(
                user_urn=str(claims["sub"]),
                org_urn=f"tml:organization:{claims['org_id']}",
                email=claims.get("email") or None,
            )

        return self.holder.submit(identify)

    # --- moved to AdminClient -----------------------------------------------------------------

    @warns(_MOVED, FutureWarning)
    def get_audit_log(
        self, event_type: AuditEventType = "all", day: date | None = None
    ) -> Future[AuditLogResponse]:
        """What happened on a day (UTC, default today), to one kind of thing or all."""
        return self._admin().get_audit_log(event_type, day)

    @warns(_MOVED, FutureWarning)
    async def get_audit_log_async(
        self, event_type: AuditEventType = "all", day: date | None = None
    ) -> AuditLogResponse:
        return await self._admin().get_audit_log_async(event_type, day)

    @warns(_MOVED, FutureWarning)
    def get_billing_usage(
        self, starting_on: datetime | str, ending_before: datetime | str
    ) -> Future[BillingUsageResponse]:
        """What was used between two moments."""
        return self._admin().get_billing_usage(starting_on, ending_before)

    @warns(_MOVED, FutureWarning)
    async def get_billing_usage_async(
        self, starting_on: datetime | str, ending_before: datetime | str
    ) -> BillingUsageResponse:
        return await self._admin().get_billing_usage_async(starting_on, ending_before)

    @warns(_MOVED, FutureWarning)
    def get_current_checkpoint_storage_usage(
        self, project_id: str | None = None
    ) -> Future[CurrentCheckpointStorageUsageResponse]:
        """The bytes that checkpoints take now."""
        return self._admin().get_current_checkpoint_storage_usage(project_id)

    @warns(_MOVED, FutureWarning)
    async def get_current_checkpoint_storage_usage_async(
        self, project_id: str | None = None
    ) -> CurrentCheckpointStorageUsageResponse:
        return await self._admin().get_current_checkpoint_storage_usage_async(project_id)

    def _admin(self) -> AdminClient:
        from tinsmith.client.admin import AdminClient

        return AdminClient(self.holder)

    # --- one call -----------------------------------------------------------------------------

    def _training_run(
        self, training_run_id: str, access_scope: AccessScope, sdk_method: str
    ) -> Future[TrainingRun]:
        endpoint = endpoints.GET_TRAINING_RUN.at(run_id=training_run_id)
        query = {"access_scope": access_scope}
        return self._call(endpoint, None, sdk_method=sdk_method, query=query).future()

    def _call(
        self, endpoint: Endpoint[Req, Resp], message: Req, **options: Unpack[Options]
    ) -> AwaitableConcurrentFuture[Resp]:
        return self.holder.submit(lambda: self.holder.api.call(endpoint, message, **options))


async def _result(future: Future[T]) -> T:
    return await AwaitableConcurrentFuture(future)


def _parsed(tinker_path: str) -> ParsedCheckpointTinkerPath:
    return ParsedCheckpointTinkerPath.from_tinker_path(tinker_path)


def _at(endpoint: Endpoint[Req, Resp], parsed: ParsedCheckpointTinkerPath) -> Endpoint[Req, Resp]:
    kind, _, name = parsed.checkpoint_id.partition("/")
    return endpoint.at(run_id=parsed.training_run_id, kind=kind, name=name)
