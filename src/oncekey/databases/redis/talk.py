"""The store in Redis: scripts, names, values, and the commands of look, swap and page. No I/O.

One hash is one record; its name is a digest of scope and key in one of 256 buckets. The bucket's number is the hash
tag, so that a record and its bucket's pages are in one slot of a cluster. All pages of a bucket are one sorted set
without scores: a member is the letter of its index, the zero-padded timestamp, scope and key, so that byte order is the
order of places.

`nodes` finds the node of a bucket, and `driver` has the connections.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b, sha1
from typing import TYPE_CHECKING, Any, Final

from redis.exceptions import NoScriptError

from oncekey.cells import Cell, Index, Place, Seen, indexed
from oncekey.core.errors import CommitAmbiguousError, StoreUnavailableError
from oncekey.databases.redis.nodes import ASTRAY, BUCKETS, HOPS, Command, Nodes, Say, Saying, decoded, instant, replied

if TYPE_CHECKING:
    from oncekey.core.model import Instant
    from oncekey.databases.redis.address import RedisAddress

MOST_UNCONFIRMED: Final = 10_000
"""How many incompletely acknowledged writes are tracked by name; beyond that, every read is confirmed."""
MINUTE: Final = 60_000_000

# Lua's numbers are doubles, so timestamps are only compared, except in a rough "long ago".
LOOK: Final = "local t = redis.call('TIME') return {t[1], t[2], redis.call('HGETALL', KEYS[1])}"

# KEYS: the record, the bucket's pages. ARGV: incarnation and version as read, or two empty strings; when it may expire
# (milliseconds) or empty; how long after its expiry it is kept, or empty; its member or empty; then fields and values.
# A full server refuses a first write; a write that replaces deletes first, which a full server allows, so that every
# request that was begun can be ended. The field '@' is the record's member in the pages. Records that the server has
# expired leave their members behind: each write removes those that are too old.
SWAP: Final = """
local incarnation, version = redis.call('HGET', KEYS[1], 'incarnation'), redis.call('HGET', KEYS[1], 'version')
if (incarnation or '') ~= ARGV[1] or (version or '') ~= ARGV[2] then return 0 end
local before = redis.call('HGET', KEYS[1], '@')
if incarnation then redis.call('DEL', KEYS[1]) end
if #ARGV > 5 then
    redis.call('HSET', KEYS[1], '@', ARGV[5], unpack(ARGV, 6))
    if ARGV[3] ~= '' then redis.call('PEXPIREAT', KEYS[1], ARGV[3]) end
end
if before and before ~= '' and before ~= ARGV[5] then redis.call('ZREM', KEYS[2], before) end
if ARGV[5] ~= '' and before ~= ARGV[5] then redis.call('ZADD', KEYS[2], 0, ARGV[5]) end
if ARGV[4] ~= '' then
    local gone = redis.call('TIME')[1] * 1000000 - ARGV[4]
    redis.call('ZREMRANGEBYLEX', KEYS[2], '[e', '(e' .. string.format('%020.0f', gone))
end
return 1
"""

# KEYS: the record, the bucket's pages. ARGV: a member whose record does not exist.
TIDY: Final = "if redis.call('EXISTS', KEYS[1]) == 0 then return redis.call('ZREM', KEYS[2], ARGV[1]) end return 0"

_LETTERS: Final[Mapping[Index, bytes]] = {
    Index.UNFINISHED: b"u",
    Index.UNKNOWN: b"d",
    Index.EXPIRING: b"e",
    Index.KEPT: b"k",
    Index.ROLL: b"r",
}
_SETTINGS: Final = ("appendonly", "appendfsync", "maxmemory-policy")
_INFO_FIELDS: Final = ("connected_slaves", "maxmemory_policy", "aof_enabled")
_DIGESTS: Final = {script: sha1(script.encode(), usedforsecurity=False).hexdigest() for script in (LOOK, SWAP, TIDY)}


class RedisTalks:
    """The verbs, on the servers of one address."""

    def __init__(self, address: RedisAddress) -> None:
        self.nodes = Nodes(address)
        self._wait = address.wait
        self._waits: tuple[Command, ...] = (("WAIT", address.wait, address.wait_ms),) if address.wait else ()
        self._unconfirmed: set[bytes] = set()
        """Writes of this process that too few replicas acknowledged; when there are too many, it is no longer updated.
        """

    def look(self, scope: str, key: str) -> Saying[tuple[Cell | None, Instant]]:
        """The cell of a key, and the server's clock."""
        bucket, names = names_of(scope, key)
        for _ in range(HOPS):
            node = yield from self.nodes.of(bucket)
            ((seconds, micros, fields),) = yield from self._run(LOOK, bucket, names[:1], [])
            cell = cell_of(fields)
            if self._needs_proof(names[0], cell):
                yield from self._confirm(bucket, names[0])
                if self.nodes.known.get(bucket) != node:
                    continue  # the reply came from a node that is no longer a primary
            return cell, instant(seconds, micros)
        raise StoreUnavailableError(ASTRAY)

    def swap(
        self, scope: str, key: str, seen: Seen | None, cell: Cell | None, keep_until: Instant | None
    ) -> Saying[bool]:
        """Replace the cell that was read with another."""
        bucket, names = names_of(scope, key)
        replies = yield from self._run(SWAP, bucket, names, arguments_of(seen, cell, keep_until), *self._waits)
        if replies[0] != 1:
            return False
        if self._wait and (acknowledged := _acknowledged(replies[1])) < self._wait:
            if len(self._unconfirmed) <= MOST_UNCONFIRMED:
                self._unconfirmed.add(names[0])
            raise CommitAmbiguousError(
                f"Redis wrote it, but {acknowledged} of {self._wait} replicas acknowledged it in time"
            )
        return True

    def page(self, index: Index, after: Place, limit: int) -> Saying[tuple[Sequence[Cell], Instant]]:
        """Entries of an index, in order, merged from all buckets; members without a record are removed."""
        letter = _LETTERS[index]
        found: list[Cell] = []
        lower = b"(" + _member(letter, *after)
        while True:
            members, more, now = yield from self._members(letter, lower, limit - len(found))
            places = {member: _named(member) for member in members}
            asked = {member: (bucket, ("HGETALL", names[0])) for member, (bucket, names) in places.items()}
            hashes, _ = yield from self.nodes.ask_all(asked)
            for member, (bucket, names) in places.items():
                cell = cell_of(hashes[member])
                if cell is None:
                    yield from self._run(TIDY, bucket, names, [member])
                elif member_of(cell) == member:
                    found.append(cell)
            if len(found) >= limit or not more:
                return found[:limit], now
            lower = b"(" + members[-1]

    def diagnostics(self) -> Saying[tuple[Mapping[str, Any], ...]]:
        """Each primary's report on persistence, memory and replicas."""
        yield from self.nodes.of(0)
        rows = []
        for node in dict.fromkeys(self.nodes.known.values()):
            reply, *settings = yield Say(node, (("INFO",), *(("CONFIG", "GET", name) for name in _SETTINGS)))
            info = dict(line.split(":", 1) for line in decoded(replied(reply)).splitlines() if ":" in line)
            row: dict[str, Any] = {"node": f"{node[0]}:{node[1]}", "wait": self._wait}
            row |= {name: info.get(name) for name in _INFO_FIELDS}
            for name, pair in zip(_SETTINGS, settings, strict=True):
                row[name] = decoded(pair[1]) if isinstance(pair, list) and len(pair) == 2 else None  # noqa: PLR2004
            rows.append(row)
        return tuple(rows)

    def _members(self, letter: bytes, lower: bytes, wanted: int) -> Saying[tuple[list[bytes], bool, Instant]]:
        """The first members after a place, whether there are more, and the clock.

        Each bucket is queried for a few. If one has more than were requested, only members up to its last are certain;
        so the request is doubled until there are enough.
        """
        each = max(4, wanted // 32)
        while True:
            limits = (lower, b"[" + letter + b"\xff", "LIMIT", 0, each)
            asked = {one: (one, ("ZRANGEBYLEX", _pages(one), *limits)) for one in range(BUCKETS)}
            replies, now = yield from self.nodes.ask_all(asked)
            full = [members[-1] for members in replies.values() if len(members) == each]
            known = sorted(member for members in replies.values() for member in members)
            certain = [member for member in known if not full or member <= min(full)]
            if len(certain) >= wanted or not full:
                return certain[:wanted], bool(full) or len(certain) > wanted, now
            each *= 2

    def _needs_proof(self, name: bytes, cell: Cell | None) -> bool:
        """Whether the read must survive a failover: it has a response, or an unconfirmed write of this process."""
        if not self._wait:
            return False
        answered = cell is not None and cell["state"] == "completed"
        return answered or name in self._unconfirmed or len(self._unconfirmed) > MOST_UNCONFIRMED

    def _confirm(self, bucket: int, name: bytes) -> Saying[None]:
        """Confirm earlier writes: a write that replicas have acknowledged proves all writes before it."""
        barrier = ("SET", b"oncekey:{%d}:barrier" % bucket, b"1")
        replies = yield from self.nodes.ask(bucket, barrier, *self._waits)
        if isinstance(replies[0], Exception) or _acknowledged(replies[1]) < self._wait:
            raise StoreUnavailableError("too few replicas of Redis confirm the record that was read")
        if len(self._unconfirmed) <= MOST_UNCONFIRMED:
            self._unconfirmed.discard(name)

    def _run(
        self, script: str, bucket: int, names: list[bytes], arguments: list[bytes], *behind: Command
    ) -> Saying[Sequence[Any]]:
        """Run a script by its digest, or send its text if the server does not have it; it was not executed then."""
        rest = (len(names), *names, *arguments)
        writes = script is SWAP
        replies = yield from self.nodes.ask(bucket, ("EVALSHA", _DIGESTS[script], *rest), *behind, writes=writes)
        if isinstance(replies[0], NoScriptError):
            replies = yield from self.nodes.ask(bucket, ("EVAL", script, *rest), *behind, writes=writes)
        replied(replies[0])
        return replies


def _acknowledged(reply: Any) -> int:  # noqa: ANN401  (a reply)
    """How many replicas a WAIT counted; 0 if it was refused."""
    return 0 if isinstance(reply, Exception) else int(reply)


# Names and values


def names_of(scope: str, key: str) -> tuple[int, list[bytes]]:
    """The bucket and name of a record, and the name of its bucket's pages; the length separates scope and key."""
    first, second = _encoded(scope), _encoded(key)
    digest = blake2b(b"%d:%b%b" % (len(first), first, second), digest_size=20)
    bucket = int.from_bytes(digest.digest()[:4], "big") % BUCKETS
    return bucket, [b"oncekey:{%d}:%b" % (bucket, digest.hexdigest().encode()), _pages(bucket)]


def _pages(bucket: int) -> bytes:
    return b"oncekey:{%d}:pages" % bucket


def _member(letter: bytes, instant: int, scope: str, key: str) -> bytes:
    """A place as bytes that sort like places: scopes have no byte below the separator, and timestamps are digits."""
    return b"%b%020d%b\x00%b" % (letter, instant, _encoded(scope), _encoded(key))


def member_of(cell: Cell) -> bytes:
    """The member of a cell in its bucket's pages, or nothing."""
    where = indexed(cell)
    return b"" if where is None else _member(_LETTERS[where[0]], where[1], cell["scope"], cell["key"])


def _named(member: bytes) -> tuple[int, list[bytes]]:
    """The names of a member's record."""
    scope, _, key = member[21:].partition(b"\x00")
    return names_of(_plain(scope), _plain(key))


def arguments_of(seen: Seen | None, cell: Cell | None, keep_until: Instant | None) -> list[bytes]:
    """The arguments of a swap."""
    proof = [b"", b""] if seen is None else [_text(seen.incarnation), _text(seen.version)]
    if cell is None:
        return [*proof, b"", b"", b""]
    where, until, grace = indexed(cell), b"", b""
    if keep_until is not None:
        until = b"%d" % (keep_until // 1000)
        if where is not None and where[0] is Index.EXPIRING:
            grace = b"%d" % (keep_until - where[1] + MINUTE)
    fields = [piece for name, value in cell.items() for piece in (name.encode(), _text(value))]
    return [*proof, until, grace, member_of(cell), *fields]


def cell_of(fields: Sequence[bytes]) -> Cell | None:
    """The cell of a hash, from its alternating names and values; None if there is no hash."""
    pairs = zip(fields[::2], fields[1::2], strict=True)
    return {name.decode(): _value(text) for name, text in pairs if name != b"@"} or None


def _text(value: object) -> bytes:
    """A value with a prefix letter for its type."""
    match value:
        case None:
            return b"n"
        case bool():
            return b"t" if value else b"f"
        case int():
            return b"i%d" % value
        case str():
            return b"s" + _encoded(value)
        case bytes():
            return b"b" + value
        case _:
            raise TypeError(f"a cell cannot store a {type(value).__name__}")


def _value(text: bytes) -> object:
    try:
        return _VALUES[text[:1]](text[1:])
    except (KeyError, ValueError) as error:
        raise StoreUnavailableError("a record in Redis was not written by oncekey") from error


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _plain(encoded: bytes) -> str:
    return encoded.decode("utf-8", "surrogatepass")


_VALUES: Final[Mapping[bytes, Callable[[bytes], object]]] = {
    b"n": lambda _: None,
    b"t": lambda _: True,
    b"f": lambda _: False,
    b"i": int,
    b"s": _plain,
    b"b": bytes,
}
