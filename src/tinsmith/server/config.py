"""Every setting of the server, in one frozen value; `config_sources` reads it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tinsmith.errors import ValidationError

_LEAST_LEASE_SECONDS = 1.0
_STORAGE_URL = re.compile(r"(?:s3|gs|az)://[^/].*|file:///.+")


def default_data_dir() -> Path:
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share") / "tinsmith"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    host: str = "127.0.0.1"
    """Address to listen on. Anything but loopback needs authentication."""

    port: int = 8000
    """Port to listen on; 0 takes a free one."""

    public_url: str | None = None
    """What clients call the server, where that differs from host and port; used in signed URLs."""

    data_dir: Path = field(default_factory=default_data_dir)
    """Where the database, weights and logs live."""

    database_url: str | None = None
    """A Postgres URL; by default an SQLite file in the data folder."""

    advertise: str | None = None
    """Where other servers of the same Postgres database reach this one, as http://10.0.0.5:8000; by
    default the host and port that it listens on."""

    lease_seconds: float = 4.0
    """How long the others wait for the server that runs the engines before one takes over. They do
    not wait for one that is known to have ended."""

    storage: str | None = None
    """Where weights and large requests are kept: s3://bucket/prefix, gs://bucket/prefix,
    az://container/prefix or file:///folder; by default the data folder. Needs the extra
    `storage`."""

    storage_cache_bytes: int = 64 * 1024**3
    """Most bytes of copies of weights in the data folder, where they are kept elsewhere."""

    storage_urls: bool = True
    """Whether clients fetch checkpoints from an object storage itself, by signed URLs; without,
    this server passes them on."""

    auth: bool = True
    """Whether requests need a key. Without, the server listens on loopback only."""

    engine: str = "local"
    """Which engine does the mathematics: "local" (PyTorch) or "fake" (a toy, for tests)."""

    engine_settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the engine itself, given one by one as `engine.NAME`."""

    models: Mapping[str, str] = field(default_factory=dict)
    """Base models to serve, name to source; empty serves the small one that comes with us."""

    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where the local engine runs: auto (cuda, or else cpu), cpu, cuda, or mps for Apple's GPUs."""

    engines: int | None = None
    """How many engine processes there are; by default one for each of `devices`, or one."""

    devices: str = ""
    """Devices, dealt out to the engines in order, as in "cuda:0,cuda:1"; by default all have
    `device`."""

    ranks: int = 1
    """Processes among which each engine divides its base models, each with the next of `devices`;
    for the local engine."""

    engine_roles: str = ""
    """Roles, dealt out to the engines in order: train, sample or both, as in "train,sample"; by
    default both."""

    cluster: str = ""
    """Where engines run if they are not processes of this server: on a Ray cluster ("auto", or its
    address), or "manual", where each is started with `tinsmith engine`."""

    engine_host: str = "127.0.0.1"
    """With `cluster`: the address of this machine to which engines connect; they prove who they
    are by certificates that the server makes."""

    engine_port: int = 0
    """The port for them; 0 takes a free one."""

    engine_cpus: int = 1
    """How many cores each engine gets in a cluster; it computes with as many threads."""

    engine_gpus: float | None = None
    """How many GPUs each engine gets in a cluster; by default one for each rank where `device` is
    cuda."""

    engine_lost_seconds: float = 60.0
    """After this long without an engine a slot's models go on in other slots."""

    warm_up: bool | None = None
    """Whether base models are loaded and kernels compiled before the server is ready; by default
    on CUDA only."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the base weights: auto, float32 or bfloat16."""

    base_weights: Literal["full", "int8", "fp8", "nf4"] = "full"
    """How the linear layers of base models are kept: full, or rounded to 8 or 4 bits."""

    deterministic: bool = False
    """Whether results must be equal to the last bit whatever else runs; slower."""

    on_policy: Literal["close", "exact"] = "close"
    """With exact, log-probabilities of sampling and of training are the same bits; slower."""

    router_replay: bool = False
    """Whether a pass whose data say which samples their tokens came from sends these tokens to the
    experts that they went to when they were sampled; for models with experts."""

    router_replay_bytes: int = 256 * 1024 * 1024
    """Most memory for the experts of sampled tokens; where it is full, the owner who takes most
    gives way first."""

    router_replay_seconds: float = 3600.0
    """How long the experts of sampled tokens are kept for the passes that follow."""

    seed: int | None = None
    """Seed for adapters that are created without one: the same order of creations gives the same
    adapters."""

    fake_pass_seconds: float = 0.0
    """How long the fake engine pretends to work on a pass or step."""

    fake_token_seconds: float = 0.0
    """How long the fake engine pretends to work on a sampled token."""

    max_body_bytes: int = 256 * 1024 * 1024
    """Largest request body, before and after decompression."""

    max_connections: int = 32_768
    """Most open connections, or as many as the system allows; a quarter for those without a key."""

    head_seconds: float = 30.0
    """How long a client may take for the head of a request."""

    body_patience_seconds: float = 30.0
    """How long a client may take for a body, beside the time that its bytes need at ..."""

    min_body_bytes_per_second: int = 16 * 1024
    """... this rate, the slowest that is waited for."""

    max_active_requests: int = 2048
    """Most requests worked on at once, those that wait for a result aside. An owner may have as
    many as are still free, so half of all if alone; further ones get a 429."""

    key_max_requests_per_second: float = 2000.0
    """Requests a second that one owner may send for long; further ones wait a second and are
    refused."""

    max_active_body_bytes: int = 1024**3
    """Most bytes of bodies worked on at once, shared as requests are; beyond, 429."""

    hold_seconds: float = 30.0
    """How long a poll for a result is held open before it is answered with "try again"."""

    metadata_only_bytes: int = 1024 * 1024
    """Results above this are announced by their size to clients that ask for that."""

    gap_timeout_seconds: float = 600.0
    """How long an operation waits for one with a lower number that has not arrived."""

    disk_patience_seconds: float = 600.0
    """How long a save waits for room on a full disk before it fails."""

    session_timeout_seconds: float = 900.0
    """After this long without a sign of life a session's models are put on disk."""

    model_retention_seconds: float = 30 * 24 * 3600.0
    """How long the unsaved state of a model is kept after the last sign of its session."""

    trash_seconds: float = 3 * 24 * 3600.0
    """How long deleted checkpoints, and files that the store does not know, wait in the trash."""

    sampler_retention_seconds: float = 24 * 3600.0
    """How long the unnamed samplers of a session that is silent but not finished are kept: its
    client may be on a computer that sleeps."""

    finished_sampler_seconds: float = 300.0
    """How long those of a finished session are kept after somebody last sampled."""

    max_gathered_tokens: int = 65_536
    """Most tokens of training passes in one engine call; a longer single pass runs alone."""

    max_gathered_seconds: float = 0.25
    """Most time that the passes of one engine call are expected to take; where 2,048 tokens take
    longer, their time, up to 2 s. A longer pass runs alone."""

    max_loaded_models: int = 32
    """Models in the engine's memory beyond which those that have nothing to do are put on disk
    within seconds, the one idle longest first. Models at work stay in memory, even if they are
    more."""

    max_engine_bytes: int | None = None
    """Memory of the engine beyond which idle models go to disk; None goes by their number, and by
    the share that the engine's plan has for adapters."""

    max_loaded_samplers: int = 64
    """Most frozen adapters in the engine; the one idle longest makes room, or else a job waits."""

    snapshot_steps: int = 50
    """A model's state is saved after this many optimizer steps..."""

    snapshot_seconds: float = 120.0
    """... or at most this long after the first operation that is not in the last snapshot (from
    half of it on, so that models that began together are not all saved at once) ..."""

    snapshot_log_bytes: int = 256 * 1024 * 1024
    """... or when its log since the last snapshot has grown to this size..."""

    snapshot_log_operations: int = 4096
    """... or to so many operations, though none of them has changed the model."""

    max_queued_memory_bytes: int = 256 * 1024 * 1024
    """Most memory for training requests that wait, an eighth of it for one owner; others are read
    from disk in their turn."""

    engine_silence_seconds: float = 60.0
    """An engine process that gives no sign of life for this long is replaced..."""

    engine_turn_seconds: float = 900.0
    """... and so is one that is busy with one turn for this long, and 0.1 s more for each token."""

    engine_attempts: int = 3
    """How often an operation may be under way when the engine dies before it is given up."""

    max_queued_samples: int = 8192
    """Most sampling requests under way, of which one owner may have as many as are still free."""

    max_queued_sample_bytes: int = 1024**3
    """Most bytes of prompts, and of what comes with them, under way, of which one owner may have as
    many as are still free."""

    sample_abandon_seconds: float = 60.0
    """A sample that nobody waits for, of a session silent for this long, is given up."""

    sample_result_bytes: int = 512 * 1024 * 1024
    """Most memory for sampling results; the owner with the most loses the oldest first."""

    sample_retention_seconds: float = 3600.0
    """How long a sampling result waits to be fetched."""

    training_result_bytes: int = 4 * 1024**3
    """Most disk for results of training operations; the owner with the most loses the oldest
    first."""

    training_retention_seconds: float = 7 * 24 * 3600.0
    """How long a result of a training operation waits to be fetched."""

    retrieved_retention_seconds: float = 3600.0
    """How long a result is kept after it was fetched, in case the answer was lost."""

    log_keep_operations: int = 10_000
    """How many ended operations of a model stay in its log when their results are gone; a number
    from before those is refused when it comes again."""

    keep_examples: int = 0
    """How many sequences of each training pass, and answers of each sampler of a run, are kept to
    be looked at in the console; none unless asked for, because data is private."""

    event_stream_seconds: float = 3600.0
    """How long a stream of events stays open; a browser then opens another by itself."""

    trace_endpoint: str | None = None
    """Where OpenTelemetry spans go, as in http://localhost:4318/v1/traces. Needs the extra
    `otel`."""

    signed_url_seconds: int = 3600
    """How long a download URL is good for."""

    token_seconds: int = 3600
    """How long a token exchanged for a key is good for."""

    key_max_models: int | None = None
    """Most models one owner may have in active sessions."""

    key_max_sessions: int = 1_000_000
    """Most sessions of one owner, finished ones included; beyond, none can be begun."""

    key_max_session_bytes: int = 256 * 1024 * 1024
    """Most bytes of metadata, tags and other texts that one owner gives to sessions; beyond, only
    sessions without can be begun."""

    key_max_metadata_bytes: int = 256 * 1024 * 1024
    """Most bytes of metadata and project names that one owner gives to models and checkpoints;
    beyond, only those without can be made."""

    key_max_queued_bytes: int = 16 * 1024**3
    """Most bytes of unfinished training requests of one owner; beyond, clients wait."""

    key_max_queued_operations: int = 50_000
    """Most unfinished training requests of one owner; beyond, clients wait."""

    key_max_stored_bytes: int | None = None
    """Most bytes of one owner's checkpoints and unnamed samplers."""

    key_max_upload_bytes: int = 16 * 1024**3
    """Most bytes of adapters that one owner is uploading to be imported."""

    key_max_example_bytes: int = 64 * 1024 * 1024
    """Most bytes of one owner's examples; the oldest go first."""

    key_max_posted_bytes: int = 1024**3
    """Most bytes of metrics that one owner posts to runs."""

    key_max_losses: int = 4096
    """Most uploaded losses of one owner; beyond, an upload is refused."""

    key_max_loss_bytes: int = 64 * 1024 * 1024
    """Most bytes of one owner's uploaded losses, as JSON; beyond, an upload is refused."""

    loss_retention_seconds: float = 7 * 24 * 3600.0
    """How long an uploaded loss is kept after a pass used it last, and in any case for as long as
    such a pass may have to be run again."""

    pjwt_auth_enabled: bool = False
    """Whether clients exchange their key for short-lived tokens."""

    parallel_fwdbwd_chunks: bool = True
    """Whether clients send the parts of one pass at the same time."""

    proto_compress_fwdbwd: bool = False
    """Whether clients compress passes; pays over slow links."""

    create_model_via_load_weights: bool = True
    """Whether clients resume from a checkpoint in one request."""

    sample_use_retrieve_futures: bool = False
    """Whether clients wait for all samples of a sampler with one poll."""

    custom_loss_server_side: bool = False
    """Whether clients send traced losses to run here."""

    sample_join_sampling_session: bool = True
    """Whether further clients of a sampler ask for a number."""

    sample_cancel_enabled: bool = True
    """Whether clients say when they no longer wait for a sample."""

    def __post_init__(self) -> None:
        if self.trace_endpoint and not self.trace_endpoint.startswith(("http://", "https://")):
            raise ValidationError(
                f"expected a URL that begins with http:// or https://, got {self.trace_endpoint!r}",
                "trace_endpoint",
            )
        if self.advertise is not None:
            _check_address(self)
        if not self.lease_seconds >= _LEAST_LEASE_SECONDS:
            raise ValidationError(
                f"must be at least {_LEAST_LEASE_SECONDS:g}, got {self.lease_seconds:g}",
                "lease_seconds",
            )
        if self.storage is not None and not _STORAGE_URL.fullmatch(self.storage):
            raise ValidationError(
                "expected s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or "
                f"file:///folder, got {self.storage!r}",
                "storage",
            )
        if not self.auth and not self.is_loopback:
            raise ValidationError(
                f"a server without authentication listens on loopback only, not on {self.host!r}; "
                "use --auth, or omit --host"
            )

    @property
    def shares_store(self) -> bool:
        """Whether other servers may use the same database."""
        return self.database_url is not None and self.database_url.startswith("postgresql")

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return self.host in ("127.0.0.1", "::1", "localhost")


def _check_address(config: ServerConfig) -> None:
    address = str(config.advertise)
    if not re.fullmatch(r"http://[^/?#@]+", address.rstrip("/")):
        raise ValidationError(
            f"expected http://HOST:PORT, where other servers reach this one, got {address!r}",
            "advertise",
        )
    if not config.shares_store:
        raise ValidationError(
            "is for several servers of one Postgres database; give that as database_url",
            "advertise",
        )
