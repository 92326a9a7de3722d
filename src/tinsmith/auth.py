"""What is known about the caller's credentials, without a client."""

from __future__ import annotations

from tinsmith.errors import TinkerError
from tinsmith.transport.config import ClientConfig
from tinsmith.transport.tokens import StaticKey, static_key

__all__ = ["get_tinker_token", "raise_if_tinker_not_accessible", "tinker_has_credentials"]


def get_tinker_token() -> str | None:
    """The key in the environment or the stored one; None if there is none or it is malformed.

    Runs nothing and contacts nobody.
    """
    try:
        key = static_key(ClientConfig.from_env())
        return None if key is None else StaticKey(key).key
    except (OSError, TinkerError):
        return None


def tinker_has_credentials() -> bool:
    """Whether a client could be made. A credential command counts, and is not run."""
    return ClientConfig.from_env().credential_command is not None or get_tinker_token() is not None


def raise_if_tinker_not_accessible() -> None:
    """Make one request, and raise what is wrong: no credential, a refused one, a billing problem,
    an unreachable service. Always a `TinkerError`."""
    from tinsmith.client.service import ServiceClient

    service = ServiceClient()
    try:
        service.check_accessible()
    except TinkerError:
        raise
    except OSError as error:
        raise TinkerError(str(error)) from error
    finally:
        service.close("success")
