"""A model's queue: operations wait for their turn by number, whatever the order of arrival.

Nothing here knows time, tasks or the engine; the scheduler asks for the head and takes it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from tinsmith.server.operations.operation import Operation


class SequenceQueue:
    def __init__(self, next_seq_id: int, used: Iterable[int] = ()) -> None:
        """`used` are numbers from `next_seq_id` on that will never come (refused)."""
        self.next_seq_id = next_seq_id
        self._waiting: dict[int, Operation] = {}
        self._used = set(used)
        self.highest_seq_id = max(self._used, default=next_seq_id - 1)
        """The highest number that has been heard of."""
        self._skip_used()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, operation: Operation) -> None:
        """Add an operation, or put one back that was taken and has to be taken again."""
        self._waiting[operation.seq_id] = operation
        self.highest_seq_id = max(self.highest_seq_id, operation.seq_id)
        self._used.discard(operation.seq_id)
        if operation.seq_id < self.next_seq_id:
            passed = range(operation.seq_id + 1, self.next_seq_id)
            self._used.update(n for n in passed if n not in self._waiting)
            self.next_seq_id = operation.seq_id

    def use_up(self, seq_id: int) -> None:
        """A number that was refused: those behind it need not wait for it."""
        if seq_id >= self.next_seq_id:
            self._used.add(seq_id)
            self.highest_seq_id = max(self.highest_seq_id, seq_id)
            self._skip_used()

    def awaits(self, seq_id: int) -> bool:
        """Whether an operation with this number has neither come nor run."""
        is_known = seq_id in self._waiting or seq_id in self._used
        return seq_id >= self.next_seq_id and not is_known

    def head(self) -> Operation | None:
        return self._waiting.get(self.next_seq_id)

    def front(self, max_tokens: int, most: int) -> list[Operation]:
        """The operations that may run now, in order: the first; and where that is a pass, the
        passes that follow it without a gap, until they are `most` or have more than `max_tokens`.
        """
        found: list[Operation] = []
        number, num_tokens = self.next_seq_id, 0
        while (operation := self._waiting.get(number)) is not None or number in self._used:
            number += 1
            if operation is None:
                continue
            found.append(operation)
            num_tokens += operation.num_tokens
            if not operation.is_pass or num_tokens > max_tokens or len(found) >= most:
                break
        return found

    def take(self) -> Operation:
        operation = self._waiting.pop(self.next_seq_id)
        self._used.add(operation.seq_id)
        self._skip_used()
        return operation

    def operations(self) -> list[Operation]:
        return [self._waiting[seq_id] for seq_id in sorted(self._waiting)]

    def missing(self, most: int = 10) -> list[int]:
        """The first numbers that the lowest waiting operation waits for; none when it can run."""
        lowest = min(self._waiting, default=self.next_seq_id)
        absent = (n for n in range(self.next_seq_id, lowest) if n not in self._used)
        return list(islice(absent, most))

    def close(self, seq_id: int) -> None:
        """Wait for no number up to this one any more. Nothing up to it may be waiting."""
        self.next_seq_id = max(self.next_seq_id, seq_id + 1)
        self._used = {number for number in self._used if number >= self.next_seq_id}
        self._skip_used()

    def drop_all(self) -> list[Operation]:
        dropped = self.operations()
        for operation in dropped:
            self._used.add(operation.seq_id)
        self._waiting.clear()
        self._skip_used()
        return dropped

    def _skip_used(self) -> None:
        while self.next_seq_id in self._used:
            self._used.discard(self.next_seq_id)
            self.next_seq_id += 1
