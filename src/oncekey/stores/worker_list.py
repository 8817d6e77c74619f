"""The list of workers as flows over named statements: which processes run which tasks, and their last heartbeat."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from oncekey.core.flow import Flow, Row, Value
from oncekey.core.model import Duration, Instant
from oncekey.ops.stats import Roll, Worker
from oncekey.stores.statements import Statements

_NO_CALLS: Mapping[str, Sequence[str]] = MappingProxyType({})


class WorkerList:
    """The statements of the list of workers, in any store that has them."""

    def __init__(self, statements: Statements) -> None:
        self._statements = statements

    def beat(
        self, name: str, tasks: Sequence[str], every: Duration, calls: Mapping[str, Sequence[str]] = _NO_CALLS
    ) -> Flow[Instant]:
        named = {operation: list(names) for operation, names in calls.items()}
        params: dict[str, Value] = {
            "name": name,
            "tasks": json.dumps(list(tasks)),
            "every": every,
            "calls": json.dumps(named),
        }
        rows = yield from self._statements.write("beat", params)
        return int(rows[0]["seen_at"])

    def leave(self, name: str) -> Flow[None]:
        yield from self._statements.write("leave", {"name": name})

    def workers(self) -> Flow[Roll]:
        rows = yield from self._statements.read("workers", {})
        return Roll(int(rows[0]["now"]), tuple(_worker(row) for row in rows if row["name"] is not None))

    def forget_workers(self, age: Duration) -> Flow[int]:
        return len((yield from self._statements.write("forget_workers", {"age": age})))


def _worker(row: Row) -> Worker:
    tasks = tuple(str(name) for name in json.loads(row["tasks"]))
    calls = {operation: tuple(names) for operation, names in json.loads(row["calls"]).items()}
    return Worker(row["name"], tasks, int(row["started_at"]), int(row["seen_at"]), int(row["every"]), calls)
