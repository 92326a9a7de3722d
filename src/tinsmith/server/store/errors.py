"""What can go wrong with a store."""

from __future__ import annotations

from tinsmith.errors import TinkerError, ValidationError


class StoreConflictError(TinkerError):
    """What was to be written contradicts what is there; writing it again will not help."""


class StoreValueError(StoreConflictError):
    """The database cannot hold a value that was to be written: NUL in a text, or a number beyond
    64 bits."""


class OverQuotaError(StoreConflictError):
    """What an owner keeps would take more room than it may."""


class ExpiredOperationError(ValidationError):
    """An operation came again after its first coming had ended long ago and was forgotten."""


class StoreInUseError(TinkerError):
    """Another server works on the same database."""


class StoreUnavailableError(TinkerError):
    """The database or its disk cannot be read or written now. Trying again later may help, and
    what was to be written may be there or not."""


class LeaseLostError(StoreUnavailableError):
    """Another server has taken over; what this one was to write was not written."""


class StoreDamagedError(TinkerError):
    """What is on disk is not what was written."""


class ForeignStoreError(TinkerError):
    """A database and a storage do not belong together."""

    def __init__(self, storage: str, reason: str) -> None:
        """`storage` is what the storage is called, as "the data folder /data"."""
        super().__init__(
            f"this database and {storage} do not belong together: {reason}. Nothing was changed. "
            "Check --data-dir, --storage and --database-url, or restore both from one backup; to "
            "use them together all the same: tinsmith storage adopt"
        )


class StoreTooNewError(TinkerError):
    """A later version of this software has written the database."""
