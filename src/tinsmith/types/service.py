"""What a service says about itself: its models, its switches, its health."""

from __future__ import annotations

from typing import Literal

from tinsmith.types.model import Request, Response


class ClientConfigRequest(Request):
    sdk_version: str


class ClientConfigResponse(Response):
    """Switches a client reads once, when it starts. Every one may be left out."""

    pjwt_auth_enabled: bool = False
    """Exchange the credential for a short-lived token."""
    credential_default_source: str = "api_key"
    sample_dispatch_bytes_semaphore_size: int = 10 * 1024 * 1024
    inflight_response_bytes_semaphore_size: int = 50 * 1024 * 1024
    parallel_fwdbwd_chunks: bool = True
    proto_compress_fwdbwd: bool = False
    fwdbwd_max_chunk_len: int = 1024
    fwdbwd_max_chunk_bytes_count: int = 5_000_000
    fwdbwd_dispatch_bytes_semaphore_size: int = 50_000_000
    billing_exception_max_pause_duration_sec: int = 3600
    sample_no_retries: bool = False
    sample_enable_stuck_detection: bool = True
    sample_max_concurrent_requests: int = 2000
    use_pyqwest_transport: bool = True
    create_model_via_load_weights: bool = False
    sample_use_retrieve_futures: bool = False
    custom_loss_server_side: bool = False
    sample_join_sampling_session: bool = False


class ClientDynamicConfigResponse(Response):
    """Switches a client reads again from time to time."""

    refresh_interval_sec: int = 300
    sample_cancel_enabled: bool = False
    sample_cancel_max_batch_size: int = 64


class AuthTokenResponse(Response):
    jwt: str


class SupportedModel(Response):
    model_name: str | None = None
    max_context_length: int | None = None
    trainable: bool | None = None
    sampleable: bool | None = None


class GetServerCapabilitiesResponse(Response):
    supported_models: list[SupportedModel]


class HealthResponse(Response):
    status: Literal["ok"]
