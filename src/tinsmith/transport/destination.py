"""Saying where a key goes, if that may not be where its owner means it to go.

A stored key goes to its own server only. One that is given, or in the environment, goes wherever
the address leads, and the address may be one that nobody named.
"""

from __future__ import annotations

import logging

from tinsmith.errors import TinkerError
from tinsmith.transport import urls
from tinsmith.transport.config import ClientConfig
from tinsmith.transport.credentials import CredentialsFile, StoredKeys

logger = logging.getLogger(__name__)


def warn_of_strange_destination(config: ClientConfig) -> None:
    """Log a warning, before the first request, if the key may be for another server."""
    if config.api_key is None and config.credential_command is None:
        return
    homes = [
        address for address, record in _stored(config).keys.items() if record.key == config.api_key
    ]
    if any(urls.is_same_server(home, config.base_url) for home in homes):
        return
    if homes:
        logger.warning(
            "this API key was stored for %s, and now goes to %s; TINKER_BASE_URL says where",
            homes[0],
            config.base_url,
        )
    elif config.address_source == "default":
        logger.warning(
            "no server is named: requests and the API key go to the hosted service, %s. For a "
            "server of your own set TINKER_BASE_URL, or run `tinsmith auth login`",
            config.base_url,
        )
    elif config.address_source == "login":
        logger.warning(
            "the API key goes to %s, the address of the last `tinsmith auth login`, which stored "
            "another key; set TINKER_BASE_URL to the server that it is for, or unset "
            "TINKER_API_KEY",
            config.base_url,
        )


def _stored(config: ClientConfig) -> StoredKeys:
    try:
        return CredentialsFile(config.credentials_file).load()
    except (TinkerError, OSError):  # this client does not need the file
        return StoredKeys()
