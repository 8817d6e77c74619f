"""A cache of responses in the memory of this process: `Policy.replay_cache`.

A cached response was read from a committed record, and a finished record does not change while it lives. Only an
operator's `keys bust` and the reaper remove one, so the life in `Policy.replay_cache` limits how long a removed
response is still sent. The cache has a limited size, and belongs to one installation in one process; `engine.fronts`
has the cache that processes share.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import TYPE_CHECKING, Final, NamedTuple

from oncekey.core.rulings import rule_finished
from oncekey.observe.events import Consulted, Found, Notify

if TYPE_CHECKING:
    from collections.abc import Callable

    from oncekey.core.model import Claim, Duration, Finished, Instant, Record, RecordId, Refuse, Replay
    from oncekey.core.policy import Policy
    from oncekey.engine.actions import Life
    from oncekey.engine.claiming import ClaimInput

MOST_BYTES: Final = 32 * 1024 * 1024
"""The most memory for the responses of one installation: their bodies, and `OVERHEAD` for each."""
OVERHEAD: Final = 1024
"""The estimated memory of a record without its body."""


class _Finished(NamedTuple):
    record: Record | Finished
    now: Instant
    """The store's clock when it was read."""
    read_at: float
    until: float
    size: int


class Answers:
    """Finished responses in the memory of this process; its flows never wait."""

    __slots__ = ("_boot", "_bytes", "_changing", "_known", "_most", "_notify")

    def __init__(
        self, boot: Callable[[], float], notify: Notify | None = None, *, most_bytes: int = MOST_BYTES
    ) -> None:
        self._boot = boot
        self._notify = notify
        self._known: OrderedDict[RecordId, _Finished] = OrderedDict()  # like `SettledKeys.known`
        self._bytes = 0
        self._most = most_bytes
        self._changing = Lock()

    def __len__(self) -> int:
        return len(self._known)

    def find(self, asked: Claim | ClaimInput, policy: Policy) -> Life[Replay | Refuse | None]:
        """The verdict on the key's copy, if there is one, by the same rules as for a record."""
        yield from ()
        found = self._known.get(asked.id)
        now = self._boot()
        if self._notify is not None:
            known = Found.NOTHING if found is None else Found.STALE if now >= found.until else Found.HIT
            self._notify(Consulted("replay_cache", known))
        if found is None:
            return None
        if now >= found.until:
            yield from self.forget(asked.id)
            return None
        since = int((now - found.read_at) * 1_000_000)
        return rule_finished(found.record, found.now + since, asked.fingerprint, policy)

    def keep(self, replay: Replay, life: Duration) -> Life[None]:
        """Cache a response from the store for `life`; the oldest ones make room for it."""
        yield from ()
        record, now = replay.record, self._boot()
        response = record.response
        size = OVERHEAD + (0 if response is None or response.body is None else len(response.body))
        if size > self._most:
            return
        # The reader's clock may run slightly faster than the store's, so the record's own expiry limits the life, too.
        life = min(life, record.expires_at - replay.now)
        with self._changing:
            if record.id in self._known:
                return
            self._known[record.id] = _Finished(record, replay.now, now, now + life / 1_000_000, size)
            self._bytes += size
            while self._bytes > self._most:
                self._forget(next(iter(self._known)))

    def forget(self, record_id: RecordId) -> Life[bool]:
        """Remove a busted or expired response. Always True: this process no longer sends it."""
        yield from ()
        with self._changing:
            self._forget(record_id)
        return True

    def _forget(self, record_id: RecordId) -> None:
        gone = self._known.pop(record_id, None)
        if gone is not None:
            self._bytes -= gone.size
