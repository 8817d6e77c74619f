"""A record as items of a DynamoDB table: its name, its attributes, and the parts of a record too long for one item.

Every column is an attribute of the same name, so that a record can be read in the service's console. In addition there
are `pk`, the digest of scope and key (a name of fixed length, so that the service's reports about hot keys show no
client's key), `forget_at`, the second from which the service may delete the item, and, if pages list the record,
`page_shard` and `page_place`, by which the index `pages` finds it.

An item has at most 400 KB. The long columns of a longer record (a response, a stored request, a memo) are stored in
parts: items whose name is random for each write and never reused. They are written before the record names them, so a
reader either finds a record's parts, or the record has changed meanwhile. Nothing here does I/O.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from hashlib import sha256
from typing import Any, Final, TypeAlias

from oncekey.cells import Cell, Index, Place, Seen, indexed
from oncekey.core.errors import StoreError, StoreUnavailableError
from oncekey.core.model import SECOND, Instant

Item: TypeAlias = dict[str, dict[str, Any]]
"""Attributes with their types, as in DynamoDB's low-level interface: `{"version": {"N": "7"}}`."""

INDEX: Final = "pages"
EXPIRY: Final = "forget_at"
SHARDS: Final = 4
"""The number of partitions of each list of the index: one takes about 1,000 writes per second. Never change it."""
ITEM_BYTES: Final = 380_000
"""The maximum size of one item; the service takes 400 KB, and counts names and numbers differently."""
LONG: Final = ("response_body", "request", "memo", "response_headers", "last_error", "path")
"""The columns that can be long, in the order in which they are moved to parts."""

NO_DATE: Final = "DynamoDB's reply has no Date header: leases need the service's clock"
HALF_A_PAIR: Final = "half of a surrogate pair cannot be stored"
_OURS: Final = frozenset({"pk", EXPIRY, "page_shard", "page_place", "parts"})
_BEFORE_ALL: Final = 1 << 63
_LONGEST_PLACE: Final = 1000
"""The service sorts by at most 1,024 bytes."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts with the long columns of a record: one sequence of bytes, cut into pieces."""

    name: str
    count: int
    columns: tuple[tuple[str, str, int], ...]
    """Name, type and length of each column, in storage order."""

    @property
    def keys(self) -> tuple[Item, ...]:
        """The keys of the items."""
        return tuple({"pk": {"B": f"{self.name}/{number}".encode()}} for number in range(self.count))


@dataclass(frozen=True, slots=True)
class Written:
    """The items of a cell: the record's item, and the items that must be written before it."""

    item: Item
    parts: Parts | None
    pieces: tuple[Item, ...]


def key_of(scope: str, key: str) -> Item:
    """The key of a record's item."""
    return {"pk": {"B": _digest(scope, key)}}


def written(cell: Cell, keep_until: Instant | None) -> Written:
    """The items of a cell."""
    digest = _digest(cell["scope"], cell["key"])
    item: Item = {"pk": {"B": digest}, **{name: _attribute(value) for name, value in cell.items()}}
    if keep_until is not None:
        item[EXPIRY] = {"N": str(-(-keep_until // SECOND))}
    where = indexed(cell)
    if where is not None:
        item["page_shard"] = {"S": _shard(where[0], digest[0] % SHARDS)}
        item["page_place"] = {"B": sorted_by((where[1], cell["scope"], cell["key"]))}
    return _divided(item)


def _divided(item: Item) -> Written:
    try:
        size = sum(_bytes_of(name, attribute) for name, attribute in item.items())
    except UnicodeEncodeError:
        raise StoreError(HALF_A_PAIR) from None
    columns: list[tuple[str, str, int]] = []
    moved: list[bytes] = []
    for name in LONG:
        if size <= ITEM_BYTES:
            break
        (kind, value), *_ = item[name].items()
        if kind not in {"S", "B"} or not value:
            continue
        raw = value if isinstance(value, bytes) else value.encode()
        size -= len(raw)
        columns.append((name, kind, len(raw)))
        moved.append(raw)
        del item[name]
    if not moved:
        return Written(item, None, ())
    whole = b"".join(moved)
    cuts = range(0, len(whole), ITEM_BYTES)
    parts = Parts(f"part/{os.urandom(16).hex()}", len(cuts), tuple(columns))
    item["parts"] = {"S": json.dumps([parts.name, parts.count, parts.columns])}
    expiry = {EXPIRY: item[EXPIRY]} if EXPIRY in item else {}
    pieces = tuple(
        {**key, "piece": {"B": whole[cut : cut + ITEM_BYTES]}, **expiry}
        for key, cut in zip(parts.keys, cuts, strict=True)
    )
    return Written(item, parts, pieces)


def parts_of(item: Item) -> Parts | None:
    """The parts with the long columns of a record's item; None if it has none."""
    if "parts" not in item:
        return None
    name, count, columns = json.loads(item["parts"]["S"])
    return Parts(name, count, tuple((column, kind, length) for column, kind, length in columns))


def may_be_gone(item: Item, now: Instant) -> bool:
    """Whether the service may already have deleted the item and its parts, in any order."""
    return EXPIRY in item and int(item[EXPIRY]["N"]) * SECOND <= now


def cell_of(item: Item, pieces: Sequence[Item] | None = ()) -> Cell:
    """The cell of a record's item and its parts in order; None if the parts are gone."""
    cell = {name: _value(attribute) for name, attribute in item.items() if name not in _OURS}
    parts = parts_of(item)
    if parts is None:
        return cell
    whole = None if pieces is None else b"".join(bytes(piece["piece"]["B"]) for piece in pieces)
    start = 0
    for name, kind, length in parts.columns:
        raw = None if whole is None else whole[start : start + length]
        cell[name] = raw if raw is None or kind == "B" else raw.decode()
        start += length
    return cell


def proof(seen: Seen | None) -> dict[str, Any]:
    """The condition of a write: no record exists, or it is the one that was read."""
    if seen is None:
        return {"ConditionExpression": "attribute_not_exists(#p)", "ExpressionAttributeNames": {"#p": "pk"}}
    return {
        "ConditionExpression": "#i = :i AND #v = :v",
        "ExpressionAttributeNames": {"#i": "incarnation", "#v": "version"},
        "ExpressionAttributeValues": {":i": {"S": seen.incarnation}, ":v": {"N": str(seen.version)}},
    }


def page_query(table: str, index: Index, shard: int, after: bytes, limit: int) -> dict[str, Any]:
    """The query for cells of one shard of a list, after a place."""
    return {
        "TableName": table,
        "IndexName": INDEX,
        "KeyConditionExpression": "#s = :s AND #p > :p",
        "ExpressionAttributeNames": {"#s": "page_shard", "#p": "page_place"},
        "ExpressionAttributeValues": {":s": {"S": _shard(index, shard)}, ":p": {"B": after}},
        "Limit": limit,
    }


def is_at(item: Item, found: Item) -> bool:
    """Whether a record is still at the place where the index, which may be stale, found it."""
    return all(item.get(name) == found[name] for name in ("page_shard", "page_place"))


def sorted_by(place: Place) -> bytes:
    """A place as bytes that sort like places; a scope ends with a byte that is smaller than all of its own."""
    instant, scope, key = place
    name = scope.encode().replace(b"\0", b"\0\xff") + b"\0\0" + key.encode()
    if len(name) > _LONGEST_PLACE:
        name = name[: _LONGEST_PLACE - 32] + _digest(scope, key)
    return (instant + _BEFORE_ALL).to_bytes(8, "big") + name


def table_of(name: str) -> dict[str, Any]:
    """The definition of the table."""
    return {
        "TableName": name,
        "BillingMode": "PAY_PER_REQUEST",
        "KeySchema": [{"AttributeName": "pk", "KeyType": "HASH"}],
        "AttributeDefinitions": [
            {"AttributeName": "pk", "AttributeType": "B"},
            {"AttributeName": "page_shard", "AttributeType": "S"},
            {"AttributeName": "page_place", "AttributeType": "B"},
        ],
        "GlobalSecondaryIndexes": [
            {
                "IndexName": INDEX,
                "KeySchema": [
                    {"AttributeName": "page_shard", "KeyType": "HASH"},
                    {"AttributeName": "page_place", "KeyType": "RANGE"},
                ],
                "Projection": {"ProjectionType": "KEYS_ONLY"},
            }
        ],
    }


def instant_of(reply: Mapping[str, Any]) -> Instant:
    """The service's clock when it replied, rounded down to the second: up to a second behind, never ahead."""
    date = reply.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    try:
        return int(parsedate_to_datetime(date).timestamp()) * SECOND
    except (TypeError, ValueError):
        raise StoreUnavailableError(NO_DATE) from None


def _digest(scope: str, key: str) -> bytes:
    try:
        first, second = scope.encode(), key.encode()
    except UnicodeEncodeError:
        raise StoreError(HALF_A_PAIR) from None
    return sha256(len(first).to_bytes(8, "big") + first + second).digest()


def _shard(index: Index, number: int) -> str:
    return f"{index.value}/{number}"


def _attribute(value: object) -> dict[str, Any]:
    if value is None:
        return {"NULL": True}
    if isinstance(value, bool):
        return {"BOOL": value}
    if isinstance(value, int):
        return {"N": str(value)}
    if isinstance(value, str):
        return {"S": value}
    assert isinstance(value, bytes | bytearray | memoryview)
    return {"B": bytes(value)}


def _value(attribute: Mapping[str, Any]) -> Any:  # noqa: ANN401  (a column of any kind)
    ((kind, value),) = attribute.items()
    match kind:
        case "NULL":
            return None
        case "N":
            return int(value)
        case "B":
            return bytes(value)
        case _:
            return value


def _bytes_of(name: str, attribute: Mapping[str, Any]) -> int:
    """An upper bound of the bytes that the service counts for an attribute."""
    (value,) = attribute.values()
    if isinstance(value, bytes):
        return len(name) + len(value)
    return len(name) + (len(value.encode()) if isinstance(value, str) else 1) + 1
