"""The requests to DynamoDB for each verb, and the meaning of its replies and failures, for threads and asyncio.

A talk is a generator. It yields requests and is sent their replies, or a `Refused` if a refusal of the service decides
something. The module that sends the requests (`oncekey.databases.dynamodb.driver`) makes no decisions.

The meaning of failures is the core of this module. If the service returns a client error, nothing was written. If no
connection was made, nothing was written. Every other failure of a write (a timeout, a broken connection, a server
error) is ambiguous, and the flows read again: they recognise their own writes by owner, fence and version. So the SDK's
retries must be off. If it repeated a conditional write whose reply was lost, the condition would fail, and the caller
would conclude that the first write was not executed.

Only throttling is retried here, twice and after a short delay: the service reports that nothing was done. A read is
repeated once after any failure.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from botocore import exceptions

from oncekey.cells import Cell, Index, Place, Seen, Swap
from oncekey.core import errors
from oncekey.databases.dynamodb import items as dynamodb_items

if TYPE_CHECKING:
    from oncekey.core.model import Instant

T = TypeVar("T")
Reply: TypeAlias = Mapping[str, Any]
Talk: TypeAlias = "Generator[Request, Reply | Refused, T]"

MOST_ITEMS: Final = 100
"""The service's limit for one transaction."""
LOOKS: Final = 5
"""How many times a record is read if its parts are gone each time, because it has changed."""
KEYS_AT_ONCE: Final = 25
REMEMBERED: Final = 1024
WAITS: Final = 600
"""How many times, half a second apart, a new table is polled until it is ready."""

NO_TABLE: Final = "the table {table} does not exist in DynamoDB: run `oncekey migrate up`"
NO_PARTS: Final = "the record of a key names parts of its response that do not exist"
REFUSED: Final = "DynamoDB refused {operation}: {code}"
FAILED: Final = "DynamoDB did not reply to {operation}: {code}"
LOST: Final = "the reply to {operation} was lost ({code}): its outcome is unknown"
ITEMS_REFUSED: Final = "DynamoDB refused the items that the handler staged: {why}"

_THROTTLED: Final = frozenset(
    {
        "LimitExceededException",
        "ProvisionedThroughputExceeded",
        "ProvisionedThroughputExceededException",
        "RequestLimitExceeded",
        "ThrottlingError",
        "ThrottlingException",
    }
)
_DECIDES: Final = frozenset(
    {
        "ConditionalCheckFailedException",
        "ResourceInUseException",
        "TransactionCanceledException",
        "TransactionConflictException",
        "UnknownOperationException",
    }
)
_STAGED_WRONGLY: Final = frozenset({"ResourceNotFoundException", "ValidationException"})
_MOVED: Final = frozenset({"ConditionalCheckFailed", "TransactionConflict"})
_NEVER_SENT: Final = (
    exceptions.ConnectTimeoutError,
    exceptions.CredentialRetrievalError,
    exceptions.InvalidRegionError,
    exceptions.NoCredentialsError,
    exceptions.NoRegionError,
    exceptions.ParamValidationError,
    exceptions.PartialCredentialsError,
    exceptions.TokenRetrievalError,
)
_NEVER_CONNECTED: Final = frozenset({"NewConnectionError", "ClientConnectorError", "gaierror"})
"""The names of errors of urllib3, aiohttp and the resolver that mean that no connection was made."""
_SERVERS_FAULT: Final = 500


@dataclass(frozen=True, slots=True)
class Request:
    """One request, with the name of the client's method."""

    operation: str
    parameters: Mapping[str, Any]
    writes: bool = False
    pause: float = 0.0
    """Seconds to wait before it is sent."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A refusal by the service that decides something; nothing was written."""

    code: str
    reasons: tuple[str, ...] = ()
    """For a transaction: the error code of each item, in order; `None` for those without an error."""


@dataclass(frozen=True, slots=True)
class Failed:
    """No reply, or one that decides nothing; `again`: whether the request may be repeated here."""

    error: errors.StoreError
    again: bool


def understood(error: exceptions.BotoCoreError | exceptions.ClientError, request: Request) -> Refused | Failed:
    """The meaning of an SDK error for this request. Its text may contain client data, so it is not quoted."""
    operation = request.operation
    if isinstance(error, exceptions.ClientError):
        code = str(error.response.get("Error", {}).get("Code", "")) or "an unnamed error"
        if code in _DECIDES:
            reasons = error.response.get("CancellationReasons") or ()
            return Refused(code, tuple(str(one.get("Code")) for one in reasons))
        if operation == "transact_write_items" and code in _STAGED_WRONGLY:
            return Failed(errors.RolledBackError(ITEMS_REFUSED.format(why=code)), again=False)
        if code == "ResourceNotFoundException":
            named = request.parameters.get("TableName", "of that name")
            return Failed(errors.SchemaError(NO_TABLE.format(table=named)), again=False)
        if code in _THROTTLED:
            return Failed(errors.StoreUnavailableError(REFUSED.format(operation=operation, code=code)), again=True)
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", _SERVERS_FAULT))
        if status < _SERVERS_FAULT:
            return Failed(errors.StoreUnavailableError(REFUSED.format(operation=operation, code=code)), again=False)
        return _unanswered(request, code, error)
    if operation == "transact_write_items" and isinstance(error, exceptions.ParamValidationError):
        return Failed(
            errors.RolledBackError(ITEMS_REFUSED.format(why="TransactWriteItems does not accept them")), again=False
        )
    if isinstance(error, _NEVER_SENT) or _never_connected(error):
        certain = errors.StoreUnavailableError(FAILED.format(operation=operation, code=type(error).__name__))
        certain.__cause__ = error
        return Failed(certain, again=not request.writes)
    return _unanswered(request, type(error).__name__, error)


def _never_connected(error: exceptions.BotoCoreError) -> bool:
    """Whether no connection was made; aiobotocore raises the same for a broken one, so the original error decides."""
    if not isinstance(error, exceptions.EndpointConnectionError):
        return False
    return any(kind.__name__ in _NEVER_CONNECTED for kind in type(error.kwargs.get("error")).__mro__)


def _unanswered(request: Request, code: str, cause: Exception) -> Failed:
    kind, text = (errors.CommitAmbiguousError, LOST) if request.writes else (errors.StoreUnavailableError, FAILED)
    error = kind(text.format(operation=request.operation, code=code))
    error.__cause__ = cause
    return Failed(error, again=not request.writes)


class Dialogue:
    """The talks about one table."""

    def __init__(self, table: str) -> None:
        self.table = table
        self._parts: dict[bytes, tuple[Seen, dynamodb_items.Parts]] = {}
        """Digest of a record -> the parts of its current version; the request that replaces the version deletes
        them. Parts that are missed, after a crash for example, only cost storage."""

    def look(self, scope: str, key: str) -> Talk[tuple[Cell | None, Instant]]:
        """A consistent read, and the service's clock."""
        for _ in range(LOOKS):
            reply = _answered(
                (yield self._request("get_item", Key=dynamodb_items.key_of(scope, key), ConsistentRead=True))
            )
            now, item = dynamodb_items.instant_of(reply), reply.get("Item")
            if item is None:
                return None, now
            cell = yield from self._whole(item, now)
            if cell is not None:
                return cell, now
        raise errors.RecordUnreadableError(NO_PARTS)

    def swap(
        self, scope: str, key: str, seen: Seen | None, cell: Cell | None, keep_until: Instant | None
    ) -> Talk[bool]:
        """One conditional write; False if the record has changed, or another request is writing it."""
        swap = Swap(scope, key, seen, cell, keep_until)
        action, made = self._prepared(swap)
        yield from self._put(made)
        ((kind, parameters),) = action.items()
        operation = "put_item" if kind == "Put" else "delete_item"
        reply = yield Request(operation, parameters, writes=True)
        if not isinstance(reply, Refused):
            yield from self._replaced(swap)
            return True
        yield from self._delete(made.parts)
        if reply.code in {"ConditionalCheckFailedException", "TransactionConflictException"}:
            return False
        raise errors.StoreUnavailableError(REFUSED.format(operation=operation, code=reply.code))

    def transact(self, swaps: Sequence[Swap], items: Sequence[Mapping[str, Any]]) -> Talk[bool]:
        """Write records and the handler's items, all or none; False if a record has changed since it was read."""
        prepared = [self._prepared(swap) for swap in swaps]
        for _, made in prepared:
            yield from self._put(made)
        actions = [action for action, _ in prepared]
        reply = yield Request("transact_write_items", {"TransactItems": [*actions, *items]}, writes=True)
        if not isinstance(reply, Refused):
            for swap in swaps:
                yield from self._replaced(swap)
            return True
        for _, made in prepared:
            yield from self._delete(made.parts)
        return _cancelled(reply, len(swaps))

    def page(self, index: Index, after: Place, limit: int) -> Talk[tuple[list[Cell], Instant]]:
        """Entries of a list, each as it is now; stale entries of the service's index are left out."""
        place, now = dynamodb_items.sorted_by(after), 0
        cells: list[Cell] = []
        while len(cells) < limit:
            found: list[dynamodb_items.Item] = []
            for shard in range(dynamodb_items.SHARDS):
                reply = _answered(
                    (yield Request("query", dynamodb_items.page_query(self.table, index, shard, place, limit)))
                )
                now = dynamodb_items.instant_of(reply)
                found += reply["Items"]
            last = len(found) < limit
            found = sorted(found, key=lambda item: bytes(item["page_place"]["B"]))[: limit - len(cells)]
            there = yield from self._batch([{"pk": one["pk"]} for one in found])
            for one in found:
                item = there.get(bytes(one["pk"]["B"]))
                cell = (
                    None if item is None or not dynamodb_items.is_at(item, one) else (yield from self._whole(item, now))
                )
                cells += [] if cell is None else [cell]
            if last:
                break
            place = bytes(found[-1]["page_place"]["B"])
        return cells, now

    def diagnostics(self, pause: float = 0.0) -> Talk[tuple[dict[str, Any], ...]]:
        """The service's report about the table; no rows if there is no table."""
        try:
            reply = yield Request("describe_table", {"TableName": self.table}, pause=pause)
        except errors.SchemaError:
            return ()
        table = _answered(reply)["Table"]
        expiry = yield from self._asked("describe_time_to_live")
        backups = yield from self._asked("describe_continuous_backups")
        indexes = {one["IndexName"]: one.get("IndexStatus") for one in table.get("GlobalSecondaryIndexes", ())}
        billing = table.get("BillingModeSummary", {}).get("BillingMode", "PROVISIONED")
        capacity = table.get("ProvisionedThroughput", {})
        return (
            {
                "table": self.table,
                "status": table["TableStatus"],
                "key": [(one["AttributeName"], one["KeyType"]) for one in table["KeySchema"]] == [("pk", "HASH")],
                "index": indexes.get(dynamodb_items.INDEX),
                "expiry": _expiry(expiry),
                "recovery": _recovery(backups),
                "billing": billing,
                "writes": capacity.get("WriteCapacityUnits", 0),
            },
        )

    def make(self) -> Talk[bool]:
        """Create the table, wait for it, and turn on expiry; False if it existed."""
        reply = yield Request("create_table", dynamodb_items.table_of(self.table), writes=True)
        made = not isinstance(reply, Refused)
        if isinstance(reply, Refused) and reply.code != "ResourceInUseException":
            raise errors.StoreUnavailableError(REFUSED.format(operation="create_table", code=reply.code))
        for number in range(WAITS):
            rows = yield from self.diagnostics(pause=0.5 if number else 0.0)
            if rows and rows[0]["status"] == "ACTIVE" and rows[0]["index"] in {None, "ACTIVE"}:
                break
        else:
            raise errors.StoreUnavailableError(f"the table {self.table} has not become active")
        if rows[0]["expiry"] is False:
            wanted = {"Enabled": True, "AttributeName": dynamodb_items.EXPIRY}
            yield self._request("update_time_to_live", TimeToLiveSpecification=wanted)
        return made

    def _asked(self, operation: str) -> Talk[Reply | None]:
        """Send a request that may be forbidden, or unsupported by an emulator; only `oncekey doctor` needs it."""
        try:
            reply = yield self._request(operation)
        except errors.StoreUnavailableError:
            return None
        return None if isinstance(reply, Refused) else reply

    def _request(self, operation: str, **parameters: Any) -> Request:  # noqa: ANN401  (what the operation takes)
        return Request(operation, {"TableName": self.table, **parameters})

    def _prepared(self, swap: Swap) -> tuple[dict[str, Any], dynamodb_items.Written]:
        """A swap as part of a transaction, and the parts that must be written before it."""
        key, condition = dynamodb_items.key_of(swap.scope, swap.key), dynamodb_items.proof(swap.seen)
        if swap.cell is None:
            return {"Delete": {"TableName": self.table, "Key": key, **condition}}, dynamodb_items.Written(key, None, ())
        made = dynamodb_items.written(swap.cell, swap.keep_until)
        return {"Put": {"TableName": self.table, "Item": made.item, **condition}}, made

    def _put(self, made: dynamodb_items.Written) -> Talk[None]:
        """Write parts. Their names are unique, so a part whose reply is lost is never named by a record."""
        for piece in made.pieces:
            _answered((yield Request("put_item", {"TableName": self.table, "Item": piece})))

    def _delete(self, parts: dynamodb_items.Parts | None) -> Talk[None]:
        """Delete parts. The record's own write has succeeded, so a failure only leaves them behind."""
        with suppress(errors.StoreError):
            for key in () if parts is None else parts.keys:
                yield self._request("delete_item", Key=key)

    def _replaced(self, swap: Swap) -> Talk[None]:
        old = self._parts.get(dynamodb_items.key_of(swap.scope, swap.key)["pk"]["B"])
        if old is not None and old[0] == swap.seen:
            yield from self._delete(old[1])

    def _whole(self, item: dynamodb_items.Item, now: Instant) -> Talk[Cell | None]:
        """The cell of an item, with its parts; None if some are gone: the record has changed."""
        parts = dynamodb_items.parts_of(item)
        if parts is None:
            return dynamodb_items.cell_of(item)
        seen = Seen(item["incarnation"]["S"], int(item["version"]["N"]))
        if len(self._parts) >= REMEMBERED:
            self._parts.clear()
        self._parts[bytes(item["pk"]["B"])] = seen, parts
        if dynamodb_items.may_be_gone(item, now):
            return dynamodb_items.cell_of(item, None)
        there = yield from self._batch(list(parts.keys))
        pieces = [there.get(key["pk"]["B"]) for key in parts.keys]
        return dynamodb_items.cell_of(item, [one for one in pieces if one is not None]) if None not in pieces else None

    def _batch(self, keys: list[dynamodb_items.Item]) -> Talk[dict[bytes, dynamodb_items.Item]]:
        """Items by their keys, as they are now; missing ones are left out."""
        there: dict[bytes, dynamodb_items.Item] = {}
        while keys:
            asked, keys = keys[:KEYS_AT_ONCE], keys[KEYS_AT_ONCE:]
            of_table = {self.table: {"Keys": asked, "ConsistentRead": True}}
            reply = _answered((yield Request("batch_get_item", {"RequestItems": of_table})))
            there |= {bytes(item["pk"]["B"]): item for item in reply["Responses"].get(self.table, ())}
            left = reply.get("UnprocessedKeys", {}).get(self.table, {}).get("Keys", [])
            if len(left) == len(asked):
                raise errors.StoreUnavailableError(REFUSED.format(operation="batch_get_item", code="UnprocessedKeys"))
            keys = left + keys
        return there


def _answered(reply: Reply | Refused) -> Reply:
    """The reply to a request that only a fault can make fail."""
    if isinstance(reply, Refused):
        raise errors.StoreUnavailableError(f"DynamoDB refused: {reply.code}")
    return reply


def _cancelled(refused: Refused, records: int) -> bool:
    """Why a transaction was cancelled: False if a changed record, or another transaction, prevented it."""
    ours, theirs = refused.reasons[:records], refused.reasons[records:]
    to_blame = sorted({one for one in (*ours, *theirs) if one != "None"})
    if any(one in _THROTTLED for one in to_blame):
        raise errors.StoreUnavailableError(REFUSED.format(operation="transact_write_items", code=", ".join(to_blame)))
    if any(one in _MOVED for one in ours) or (theirs and set(theirs) <= {"None", "TransactionConflict"}):
        return False
    if refused.code != "TransactionCanceledException":
        raise errors.StoreUnavailableError(REFUSED.format(operation="transact_write_items", code=refused.code))
    blamed = [f"item {number} {code}" for number, code in enumerate(theirs, 1) if code != "None"]
    raise errors.RolledBackError(ITEMS_REFUSED.format(why=", ".join(blamed) or ", ".join(to_blame)))


def _expiry(reply: Reply | None) -> bool | None:
    """Whether the service deletes expired items; None if it cannot be queried."""
    if reply is None:
        return None
    described = reply["TimeToLiveDescription"]
    enabled = described.get("TimeToLiveStatus") in {"ENABLED", "ENABLING"}
    return enabled and described.get("AttributeName", dynamodb_items.EXPIRY) == dynamodb_items.EXPIRY


def _recovery(reply: Reply | None) -> bool | None:
    """Whether the table can be restored to an earlier state; None if it cannot be queried."""
    if reply is None:
        return None
    described = reply["ContinuousBackupsDescription"].get("PointInTimeRecoveryDescription", {})
    return bool(described.get("PointInTimeRecoveryStatus") == "ENABLED")
