"""PostgreSQL as the last version before the split of the record's row spoke to it, and both versions side by side."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from oncekey.databases.postgres.store import PostgresStore
from oncekey.stores.sql import FILES
from oncekey.stores.statements import load

_SINCE = ("console.sql", "reseal.sql")
_SAID: Mapping[str, str] = load("contract.before_split", *(name for name in FILES if name not in _SINCE))
_REAPED = ("purge_expired", "purge_kept", "mark_expired")
OLD: Mapping[str, str] = {
    **{name: said for name, said in _SAID.items() if name not in _REAPED},
    "claim_kept": _SAID["claim"],
    "settle_alone": _SAID["settle_completed"],
}
"""Its statements, word for word; it had no other forms of them, no console and no seals.

It read what it was going to reap, so what it said then does not fit the flows of this version.
"""


class OlderStore(PostgresStore):
    """A process of the older version; the flows are the same."""

    def __init__(self, *, clock: Callable[[], int] | None = None) -> None:
        super().__init__(clock=clock)
        statements: Any = self._statements
        statements._commands = {**statements._commands, **OLD}


class EitherStore(PostgresStore):
    """Every statement comes from a process of this version, or from one of the older: a rolling deploy."""

    seed = 0

    def __init__(self, *, clock: Callable[[], int] | None = None) -> None:
        super().__init__(clock=clock)
        statements: Any = self._statements
        statements._commands = _Either(statements._commands, random.Random(self.seed))


class _Either(Mapping[str, Any]):
    def __init__(self, new: Mapping[str, Any], rng: random.Random) -> None:
        self._new = new
        self._rng = rng

    def __getitem__(self, name: str) -> Any:
        return self._rng.choice((self._new[name], OLD.get(name, self._new[name])))

    def __iter__(self) -> Iterator[str]:
        return iter(self._new)

    def __len__(self) -> int:
        return len(self._new)
