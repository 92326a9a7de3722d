"""Seeds of adapters whose creator gave none: drawn once, and recorded with the model.

With a server seed the same sequence of creations gives the same seeds: an owner's first session's
first model, and so on, whatever others create meanwhile.
"""

from __future__ import annotations

import hashlib
import secrets

from tinsmith.server.store.records import SessionRecord
from tinsmith.server.store.sessions import Sessions

_NUM_BITS = 31


async def draw_seed(
    server_seed: int | None, sessions: Sessions, session: SessionRecord, model_seq_id: int
) -> int:
    if server_seed is None:
        return secrets.randbits(_NUM_BITS)
    number = await sessions.count_before(session)
    place = f"{server_seed}/{session.owner}/{number}/{model_seq_id}"
    digest = hashlib.blake2b(place.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - _NUM_BITS)
