"""Lists that the service hands out in pages, as one loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Generic, TypeVar

from tinsmith.client.futures import APIFuture

T = TypeVar("T")


class Pages(Generic[T]):
    """For plain and async loops. A page is fetched when its first item is asked for, and a page
    that is not full is the last."""

    def __init__(self, fetch: Callable[[int], APIFuture[list[T]]], page_size: int) -> None:
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}")
        self._fetch = fetch
        self._page_size = page_size

    def __iter__(self) -> Iterator[T]:
        offset = 0
        while True:
            page = self._fetch(offset).result()
            yield from page
            if len(page) < self._page_size:
                return
            offset += len(page)

    async def __aiter__(self) -> AsyncIterator[T]:
        offset = 0
        while True:
            page = await self._fetch(offset)
            for item in page:
                yield item
            if len(page) < self._page_size:
                return
            offset += len(page)
