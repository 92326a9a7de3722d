"""Which storage a server's settings mean."""

from __future__ import annotations

from pathlib import Path

from tinsmith.server.config import ServerConfig
from tinsmith.server.data_folder import DataFolder
from tinsmith.server.storage.base import Storage
from tinsmith.server.storage.bucket import BucketBlobs, BucketStorage
from tinsmith.server.storage.cache import Cache
from tinsmith.server.storage.folder import FolderStorage
from tinsmith.server.storage.objects import Objects
from tinsmith.server.store.blobs import BlobFiles


def open_storage(config: ServerConfig) -> Storage:
    folder = DataFolder(config.data_dir)
    if config.storage is None:
        return FolderStorage(folder)
    cache = Cache(folder.cache, config.storage_cache_bytes)
    return BucketStorage(Objects(config.storage), cache, gives_urls=config.storage_urls)


def open_blobs(config: ServerConfig) -> Path | BlobFiles:
    """The part of it that a store writes to."""
    if config.storage is None:
        return DataFolder(config.data_dir).blobs
    return BucketBlobs(Objects(config.storage))
