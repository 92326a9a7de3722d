"""Jobs whose grammars are being compiled, in a thread: everybody else goes on meanwhile."""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import NamedTuple

from tinsmith.engine.base import SampleJob
from tinsmith.engine.grammar import CompiledGrammar, Tokens
from tinsmith.engine.local.model.lora import Adapter
from tinsmith.engine.local.ranks.group import ALONE, Ranks


class Compiled(NamedTuple):
    job: SampleJob
    adapter: Adapter | None
    grammar: Future[CompiledGrammar]
    """Done; its error is a `ValidationError`."""


class Compiling:
    def __init__(self, tokens: Tokens, ranks: Ranks = ALONE) -> None:
        self._tokens = tokens
        self._ranks = ranks
        self._thread: ThreadPoolExecutor | None = None
        self._waiting: dict[str, Compiled] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._waiting

    def add(self, job: SampleJob, adapter: Adapter | None) -> None:
        assert job.shaping is not None and job.shaping.grammar is not None, "it has a grammar"
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        future = self._thread.submit(self._tokens.compile, job.shaping.grammar)
        self._waiting[job.job_id] = Compiled(job, adapter, future)

    def take(self, wait_seconds: float) -> list[Compiled]:
        """The jobs that are ready, in order of arrival; waits a little where none is."""
        wait(
            [compiled.grammar for compiled in self._waiting.values()], wait_seconds, FIRST_COMPLETED
        )
        done = self._ranks.everywhere([c.grammar.done() for c in self._waiting.values()])
        ready = [c for c, is_done in zip(self._waiting.values(), done, strict=True) if is_done]
        for compiled in ready:
            del self._waiting[compiled.job.job_id]
        return ready

    def cancel(self, job_id: str) -> None:
        compiled = self._waiting.pop(job_id, None)
        if compiled is not None:
            compiled.grammar.cancel()
