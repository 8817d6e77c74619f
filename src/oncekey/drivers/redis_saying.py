"""The commands to Redis, without I/O: names, scripts, values, and the flows of look, swap and page.

One hash is one record; its name is a digest of scope and key in one of 256 buckets. The number of the bucket is the
hash tag, so that a record and the pages of its bucket are in one slot of a cluster. All pages of a bucket are one
sorted set without scores: a member is the letter of its index, the instant with leading noughts, scope and key, so that
the order of bytes is the order of places.

The flows yield `Say` and are sent the replies, in which an error is a value. They know which node has a bucket
(`Roads`), follow a cluster that moves it, and ask sentinels for a primary that is gone. A command whose outcome is open
is never repeated: after MOVED, ASK or NOSCRIPT it was not executed.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b, sha1
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from redis.exceptions import AskError, MovedError, NoScriptError, ReadOnlyError

from oncekey.cells import Index, indexed
from oncekey.core.errors import CommitAmbiguousError, StoreError, StoreUnavailableError
from oncekey.drivers.redis_address import Mode, RedisAddress

if TYPE_CHECKING:
    from oncekey.cells import Line, Place, Seen
    from oncekey.core.model import Instant

T = TypeVar("T")
K = TypeVar("K")
Node: TypeAlias = tuple[str, int]
Command: TypeAlias = tuple[Any, ...]

BUCKETS: Final = 256
"""The number of parts of the pages. It is in every name, so it never changes."""
HOPS: Final = 8
"""How often a bucket is looked for elsewhere before it counts as unreachable."""
ASTRAY: Final = "Redis sends this key from node to node"
DOUBTED: Final = 10_000
"""How many writes without a full acknowledgement are remembered by name; beyond that, every look is confirmed."""
MINUTE: Final = 60_000_000

# Lua's numbers are doubles, so instants are only compared there, except in a rough "long ago".
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

# KEYS: the record, the bucket's pages. ARGV: a member whose record is not there.
TIDY: Final = "if redis.call('EXISTS', KEYS[1]) == 0 then return redis.call('ZREM', KEYS[2], ARGV[1]) end return 0"

_LETTERS: Final[Mapping[Index, bytes]] = {
    Index.UNFINISHED: b"u",
    Index.UNKNOWN: b"d",
    Index.EXPIRING: b"e",
    Index.KEPT: b"k",
    Index.ROLL: b"r",
}
_SETTINGS: Final = ("appendonly", "appendfsync", "maxmemory", "maxmemory-policy", "min-replicas-to-write")
_TOLD: Final = ("redis_version", "valkey_version", "role", "connected_slaves", "cluster_enabled", "maxmemory_policy")


@dataclass(frozen=True, slots=True)
class Say:
    """Commands for one connection to one node, one after the other."""

    node: Node
    commands: tuple[Command, ...]
    writes: bool = False
    """Whether a missing reply leaves the outcome open."""


Saying: TypeAlias = Generator[Say, Sequence[Any], T]


@dataclass(slots=True)
class Roads:
    """Which node has which bucket, as far as this process knows, and which of its writes are not confirmed."""

    address: RedisAddress
    nodes: dict[int, Node] = field(default_factory=dict)
    met: dict[Node, None] = field(default_factory=dict)
    """All nodes that were ever named: one of them may know where the others are."""
    doubted: set[bytes] = field(default_factory=set)
    all_doubted: bool = False

    def to(self, bucket: int) -> Saying[Node]:
        """The node of a bucket."""
        if bucket not in self.nodes:
            yield from self._found()
        try:
            return self.nodes[bucket]
        except KeyError:
            raise StoreUnavailableError("no node of the Redis cluster serves this key now") from None

    def forget(self) -> None:
        """Ask anew before the next use: a node did not answer, or is no primary any more."""
        self.nodes = {}  # a new dictionary, because threads may be reading the old one

    def doubt(self, name: bytes) -> None:
        """Note that a write may be lost with its primary."""
        self.all_doubted = self.all_doubted or len(self.doubted) >= DOUBTED
        if not self.all_doubted:
            self.doubted.add(name)

    def _found(self) -> Saying[None]:
        address = self.address
        if address.mode is Mode.SINGLE:
            self.nodes = dict.fromkeys(range(BUCKETS), address.hosts[0])
            return
        asked: Command = ("CLUSTER", "SLOTS")
        if address.mode is Mode.SENTINEL:
            asked = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", address.service)
        for node in dict.fromkeys((*address.hosts, *self.met)):
            try:
                (told,) = yield Say(node, (asked,))
            except StoreError:
                continue
            if told is None or isinstance(told, Exception):
                continue
            if address.mode is Mode.SENTINEL:
                self.nodes = dict.fromkeys(range(BUCKETS), (_decoded(told[0]), int(told[1])))
            else:
                self.nodes = _served(told, node)
                self.met |= dict.fromkeys(self.nodes.values())
            return
        raise StoreUnavailableError(f"no {'sentinel' if address.mode is Mode.SENTINEL else 'node'} of Redis answers")


def _served(slots: Sequence[Any], asked: Node) -> dict[int, Node]:
    """The nodes of all buckets, by the reply of one node of a cluster; an empty host means that node itself."""
    ranges = [(int(first), int(last), _decoded(node[0]) or asked[0], int(node[1])) for first, last, node, *_ in slots]
    served = {}
    for bucket in range(BUCKETS):
        slot = _SLOTS[bucket]
        for first, last, host, port in ranges:
            if first <= slot <= last:
                served[bucket] = (host, port)
    return served


def _crc16(data: bytes) -> int:
    """CRC16 (XMODEM), by which a cluster finds the slot of a hash tag."""
    crc = 0
    for byte in data:
        crc ^= byte << 8
        for _ in range(8):
            crc = (crc << 1) ^ 0x1021 if crc & 0x8000 else crc << 1
    return crc & 0xFFFF


SLOT_COUNT: Final = 16384
_SLOTS: Final = tuple(_crc16(b"%d" % bucket) % SLOT_COUNT for bucket in range(BUCKETS))


# The verbs


def looking(roads: Roads, scope: str, key: str) -> Saying[tuple[Line | None, Instant]]:
    """The line of a key, and the server's clock."""
    bucket, names = names_of(scope, key)
    for _ in range(HOPS):
        node = yield from roads.to(bucket)
        ((seconds, micros, flat),) = yield from _scripted(roads, bucket, LOOK, [names[0]], [])
        line = line_of(dict(zip(flat[::2], flat[1::2], strict=True)))
        if roads.address.wait and _needs_proof(roads, names[0], line):
            yield from _confirmed(roads, bucket, names[0])
            if roads.nodes.get(bucket) != node:
                continue  # the reply came from a node that is no primary any more
        return line, int(seconds) * 1_000_000 + int(micros)
    raise StoreUnavailableError(ASTRAY)


def _needs_proof(roads: Roads, name: bytes, line: Line | None) -> bool:
    """Whether the read must not be lost with its primary: an answer, or a write that this process was not sure of."""
    return (line is not None and line["state"] == "completed") or roads.all_doubted or name in roads.doubted


def _confirmed(roads: Roads, bucket: int, name: bytes) -> Saying[None]:
    """Confirm earlier writes: a write that replicas have acknowledged proves all that were made before it."""
    address = roads.address
    barrier = ("SET", b"oncekey:{%d}:barrier" % bucket, b"1")
    replies = yield from _routed(roads, bucket, (barrier, ("WAIT", address.wait, address.wait_ms)), writes=False)
    if isinstance(replies[0], Exception) or _acknowledged(replies[1]) < address.wait:
        raise StoreUnavailableError("too few replicas of Redis confirm what was read")
    roads.doubted.discard(name)


def swapping(
    roads: Roads, record: tuple[str, str], seen: Seen | None, line: Line | None, keep_until: Instant | None
) -> Saying[bool]:
    """Replace the line that was read by another."""
    bucket, names = names_of(*record)
    wait = roads.address.wait
    behind = (("WAIT", wait, roads.address.wait_ms),) if wait else ()
    replies = yield from _scripted(roads, bucket, SWAP, names, arguments_of(seen, line, keep_until), *behind)
    if replies[0] != 1:
        return False
    if wait and (heard := _acknowledged(replies[1])) < wait:
        roads.doubt(names[0])
        raise CommitAmbiguousError(f"Redis wrote it, and {heard} of {wait} replicas acknowledged it in time")
    return True


def _acknowledged(reply: Any) -> int:  # noqa: ANN401  (a reply)
    """How many replicas a WAIT counted; 0 if it was refused."""
    return 0 if isinstance(reply, Exception) else int(reply)


def paging(roads: Roads, index: Index, after: Place, limit: int) -> Saying[tuple[list[Line], Instant]]:
    """Lines of an index, in order, merged from all buckets; members whose record is gone are removed."""
    letter = _LETTERS[index]
    found: list[Line] = []
    lower = b"(" + _member(letter, *after)
    seconds, micros = 0, 0
    while True:
        members, more, (seconds, micros) = yield from _members(roads, letter, lower, limit - len(found))
        lines = yield from _lines(roads, members)
        found += [line for line, member in zip(lines, members, strict=True) if line and member_of(line) == member]
        for member, line in zip(members, lines, strict=True):
            if line is None:
                bucket, names = _named(member)
                yield from _scripted(roads, bucket, TIDY, names, [member])
        if len(found) >= limit or not more:
            return found[:limit], seconds * 1_000_000 + micros
        lower = b"(" + members[-1]


def _members(
    roads: Roads, letter: bytes, lower: bytes, wanted: int
) -> Saying[tuple[list[bytes], bool, tuple[int, int]]]:
    """The first members after a place, whether there are more, and the clock.

    Each bucket is asked for a few. If one has more than it was asked for, only members up to its last are certain; so
    it is asked for twice as many until there are enough.
    """
    each = max(4, wanted // 32)
    while True:
        upper = b"[" + letter + b"\xff"
        asked = {one: (one, ("ZRANGEBYLEX", _pages(one), lower, upper, "LIMIT", 0, each)) for one in range(BUCKETS)}
        replies, clock = yield from _everywhere(roads, asked)
        full = [members[-1] for members in replies.values() if len(members) == each]
        known = sorted(member for members in replies.values() for member in members)
        certain = [member for member in known if not full or member <= min(full)]
        if len(certain) >= wanted or not full:
            return certain[:wanted], bool(full) or len(certain) > wanted, clock
        each *= 2


def _lines(roads: Roads, members: Sequence[bytes]) -> Saying[list[Line | None]]:
    asked = {}
    for member in members:
        bucket, (name, _) = _named(member)
        asked[member] = (bucket, ("HGETALL", name))
    replies, _ = yield from _everywhere(roads, asked)
    return [line_of(dict(zip(flat[::2], flat[1::2], strict=True))) for flat in (replies[one] for one in members)]


def vitals(roads: Roads) -> Saying[tuple[Mapping[str, Any], ...]]:
    """What every primary reports about its persistence, its memory and its replicas."""
    yield from roads.to(0)
    rows = []
    for node in dict.fromkeys(roads.nodes.values()):
        told, *settings = yield Say(node, (("INFO",), *(("CONFIG", "GET", name) for name in _SETTINGS)))
        if isinstance(told, Exception):
            raise StoreUnavailableError(f"Redis does not tell how it is: {str(told)[:80]}")
        info = dict(line.split(":", 1) for line in _decoded(told).splitlines() if ":" in line)
        row: dict[str, Any] = {"node": f"{node[0]}:{node[1]}", "wait": roads.address.wait}
        row |= {name: info.get(name) for name in _TOLD} | {"aof_enabled": info.get("aof_enabled")}
        for name, pair in zip(_SETTINGS, settings, strict=True):
            row[name] = _decoded(pair[1]) if isinstance(pair, list) and len(pair) == 2 else None  # noqa: PLR2004
        rows.append(row)
    return tuple(rows)


# Sending commands to the right node


def _scripted(
    roads: Roads, bucket: int, script: str, keys: list[bytes], args: list[bytes], *behind: Command
) -> Saying[Sequence[Any]]:
    """A script by its digest, or as a whole if the server does not know it."""
    writes = script is SWAP
    short = ("EVALSHA", _DIGESTS[script], len(keys), *keys, *args)
    replies = yield from _routed(roads, bucket, (short, *behind), writes=writes)
    if isinstance(replies[0], NoScriptError):
        replies = yield from _routed(roads, bucket, (("EVAL", script, len(keys), *keys, *args), *behind), writes=writes)
    if isinstance(replies[0], Exception):
        raise StoreUnavailableError(f"Redis refused: {str(replies[0])[:100]}") from replies[0]
    return replies


_DIGESTS: Final = {script: sha1(script.encode(), usedforsecurity=False).hexdigest() for script in (LOOK, SWAP, TIDY)}


def _routed(roads: Roads, bucket: int, commands: tuple[Command, ...], *, writes: bool) -> Saying[Sequence[Any]]:
    """Send commands to the bucket's node, wherever that is now; a redirected command was not executed."""
    for _ in range(HOPS):
        node = yield from roads.to(bucket)
        try:
            replies = yield Say(node, commands, writes)
            if isinstance(replies[0], AskError) and not isinstance(replies[0], MovedError):  # which is one, too
                asked = (replies[0].host or node[0], replies[0].port)
                replies = (yield Say(asked, (("ASKING",), *commands), writes))[1:]
        except StoreError:
            roads.forget()
            raise
        match replies[0]:
            case MovedError() as moved:
                roads.nodes[bucket] = (moved.host or node[0], moved.port)
            case ReadOnlyError():
                roads.forget()
            case _:
                return replies
    raise StoreUnavailableError(ASTRAY)


def _everywhere(
    roads: Roads, asked: Mapping[K, tuple[int, Command]]
) -> Saying[tuple[dict[K, Sequence[bytes]], tuple[int, int]]]:
    """Commands that only read, each about a bucket, node by node; and a clock."""
    replies: dict[K, Sequence[bytes]] = {}
    clock = (0, 0)
    for _ in range(HOPS):
        by_node: dict[Node, list[K]] = {}
        for one in asked.keys() - replies.keys():
            by_node.setdefault((yield from roads.to(asked[one][0])), []).append(one)
        for node, those in by_node.items():
            try:
                told, *answers = yield Say(node, (("TIME",), *(asked[one][1] for one in those)))
            except StoreError:
                roads.forget()
                raise
            clock = clock if isinstance(told, Exception) else (int(told[0]), int(told[1]))
            for one, answer in zip(those, answers, strict=True):
                if isinstance(answer, MovedError):
                    roads.nodes[asked[one][0]] = (answer.host or node[0], answer.port)
                elif isinstance(answer, Exception):
                    raise StoreUnavailableError(f"Redis refused: {str(answer)[:100]}") from answer
                else:
                    replies[one] = answer
        if len(replies) == len(asked):
            return replies, clock
    raise StoreUnavailableError(ASTRAY)


# Names and values


def names_of(scope: str, key: str) -> tuple[int, list[bytes]]:
    """The bucket of a record, its name, and that of its bucket's pages; the length keeps scopes and keys apart."""
    first, second = _encoded(scope), _encoded(key)
    digest = blake2b(b"%d:%b%b" % (len(first), first, second), digest_size=20)
    bucket = int.from_bytes(digest.digest()[:4], "big") % BUCKETS
    return bucket, [b"oncekey:{%d}:%b" % (bucket, digest.hexdigest().encode()), _pages(bucket)]


def _pages(bucket: int) -> bytes:
    return b"oncekey:{%d}:pages" % bucket


def _member(letter: bytes, instant: int, scope: str, key: str) -> bytes:
    """A place as bytes in its own order: no byte of a scope is below the separator, and instants sort as digits."""
    return b"%b%020d%b\x00%b" % (letter, instant, _encoded(scope), _encoded(key))


def member_of(line: Line) -> bytes:
    """The member of a line in its bucket's pages, or nothing."""
    where = indexed(line)
    return b"" if where is None else _member(_LETTERS[where[0]], where[1], line["scope"], line["key"])


def _named(member: bytes) -> tuple[int, list[bytes]]:
    """The names of a member's record."""
    scope, _, key = member[21:].partition(b"\x00")
    return names_of(scope.decode("utf-8", "surrogatepass"), key.decode("utf-8", "surrogatepass"))


def arguments_of(seen: Seen | None, line: Line | None, keep_until: Instant | None) -> list[bytes]:
    """The arguments of a swap."""
    proof = [b"", b""] if seen is None else [_text(seen.incarnation), _text(seen.version)]
    if line is None:
        return [*proof, b"", b"", b""]
    where, until, grace = indexed(line), b"", b""
    if keep_until is not None:
        until = b"%d" % (keep_until // 1000)
        if where is not None and where[0] is Index.EXPIRING:
            grace = b"%d" % (keep_until - where[1] + MINUTE)
    fields = [piece for name, value in line.items() for piece in (name.encode(), _text(value))]
    return [*proof, until, grace, member_of(line), *fields]


def line_of(pairs: Mapping[bytes, bytes]) -> Line | None:
    """The line of a hash."""
    if not pairs:
        return None
    return {name.decode(): _value(text) for name, text in pairs.items() if name != b"@"}


def _text(value: object) -> bytes:
    """A value with a letter for its type."""
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
            raise TypeError(f"a line has no {type(value).__name__}")


def _value(text: bytes) -> object:
    match text[:1], text[1:]:
        case b"n", _:
            return None
        case b"t", _:
            return True
        case b"f", _:
            return False
        case b"i", digits:
            return int(digits)
        case b"s", encoded:
            return encoded.decode("utf-8", "surrogatepass")
        case b"b", raw:
            return raw
        case _:
            raise StoreUnavailableError("a record in Redis was not written by oncekey")


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _decoded(text: Any) -> str:  # noqa: ANN401  (a reply)
    return text.decode() if isinstance(text, bytes) else str(text or "")
