"""Finds the Redis node of a record: the one server, a node of a cluster, or the primary that sentinels name.

Generators without I/O: they yield `Say` and are sent the replies, in which an error is a value. They follow a bucket
that moves in a cluster, and query the sentinels when the known primary is gone. A command whose outcome is unknown is
never repeated; after MOVED and ASK it was not executed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from redis.crc import key_slot
from redis.exceptions import AskError, MovedError, ReadOnlyError

from oncekey.core.errors import StoreError, StoreUnavailableError
from oncekey.databases.cells import Talk
from oncekey.databases.redis.address import Mode, RedisAddress

if TYPE_CHECKING:
    from oncekey.core.model import Instant

T = TypeVar("T")
K = TypeVar("K")
Node: TypeAlias = tuple[str, int]
Command: TypeAlias = tuple[Any, ...]

BUCKETS: Final = 256
"""The number of buckets of records. A bucket's number is its hash tag and part of every name, so this never changes."""
HOPS: Final = 8
"""How many times a bucket is looked up before it counts as unreachable."""
ASTRAY: Final = "Redis redirects this key from node to node"
_SLOTS: Final = tuple(key_slot(b"%d" % bucket) for bucket in range(BUCKETS))


@dataclass(frozen=True, slots=True)
class Say:
    """Commands for one connection to one node, in order."""

    node: Node
    commands: tuple[Command, ...]
    writes: bool = False
    """Whether a missing reply leaves the outcome unknown."""


Saying: TypeAlias = Talk[Say, T]


class Nodes:
    """Which node has which bucket, as known to this process."""

    def __init__(self, address: RedisAddress) -> None:
        self._address = address
        self.known: dict[int, Node] = {}
        self._met: dict[Node, None] = dict.fromkeys(address.hosts)
        """All nodes that were ever named: one of them may list the others."""

    def of(self, bucket: int) -> Saying[Node]:
        """The node of a bucket."""
        if bucket not in self.known:
            yield from self._find()
        try:
            return self.known[bucket]
        except KeyError:
            raise StoreUnavailableError("no node of the Redis cluster serves this key") from None

    def forget(self) -> None:
        """Look the nodes up again before the next use: a node did not reply, or is no longer a primary."""
        self.known = {}  # a new dictionary, because threads may be reading the old one

    def ask(self, bucket: int, *commands: Command, writes: bool = False) -> Saying[Sequence[Any]]:
        """Send commands to the bucket's current node; a redirected command was not executed."""
        for _ in range(HOPS):
            node = yield from self.of(bucket)
            try:
                replies: Sequence[Any] = yield Say(node, commands, writes)
                if isinstance(replies[0], AskError) and not isinstance(replies[0], MovedError):  # which is one, too
                    asked = (replies[0].host or node[0], replies[0].port)
                    replies = (yield Say(asked, (("ASKING",), *commands), writes))[1:]
            except StoreError:
                self.forget()
                raise
            match replies[0]:
                case MovedError() as moved:
                    self.known[bucket] = (moved.host or node[0], moved.port)
                case ReadOnlyError():
                    self.forget()
                case _:
                    return replies
        raise StoreUnavailableError(ASTRAY)

    def ask_all(self, asked: Mapping[K, tuple[int, Command]]) -> Saying[tuple[dict[K, Any], Instant]]:
        """Read commands, each for a bucket, in one message to every node; and a clock."""
        replies: dict[K, Any] = {}
        now: Instant = 0
        for _ in range(HOPS):
            by_node: dict[Node, list[K]] = {}
            for one in asked.keys() - replies.keys():
                by_node.setdefault((yield from self.of(asked[one][0])), []).append(one)
            for node, those in by_node.items():
                try:
                    time, *answers = yield Say(node, (("TIME",), *(asked[one][1] for one in those)))
                except StoreError:
                    self.forget()
                    raise
                now = instant(*replied(time))
                for one, answer in zip(those, answers, strict=True):
                    if isinstance(answer, MovedError):
                        self.known[asked[one][0]] = (answer.host or node[0], answer.port)
                    else:
                        replies[one] = replied(answer)
            if len(replies) == len(asked):
                return replies, now
        raise StoreUnavailableError(ASTRAY)

    def _find(self) -> Saying[None]:
        address = self._address
        if address.mode is Mode.SINGLE:
            self.known = dict.fromkeys(range(BUCKETS), address.hosts[0])
            return
        by_sentinels = address.mode is Mode.SENTINEL
        question = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", address.service) if by_sentinels else ("CLUSTER", "SLOTS")
        for node in tuple(self._met):
            try:
                (reply,) = yield Say(node, (question,))
            except StoreError:
                continue
            if reply is None or isinstance(reply, Exception):
                continue
            if by_sentinels:
                self.known = dict.fromkeys(range(BUCKETS), (decoded(reply[0]), int(reply[1])))
            else:
                self.known = _served(reply, node)
                self._met |= dict.fromkeys(self.known.values())
            return
        raise StoreUnavailableError(f"no {'sentinel' if by_sentinels else 'node'} of Redis replies")


def _served(slots: Sequence[Any], asked: Node) -> dict[int, Node]:
    """The nodes of all buckets, from the reply of one cluster node; an empty host means that node itself."""
    return {
        bucket: (decoded(node[0]) or asked[0], int(node[1]))
        for first, last, node, *_ in slots
        for bucket, slot in enumerate(_SLOTS)
        if first <= slot <= last
    }


def replied(reply: Any) -> Any:  # noqa: ANN401  (a reply)
    """Return the reply, or raise if it is an error."""
    if isinstance(reply, Exception):
        raise StoreUnavailableError(f"Redis refused: {str(reply)[:100]}") from reply
    return reply


def instant(seconds: bytes, micros: bytes) -> Instant:
    """The server's clock, from the two numbers of TIME."""
    return int(seconds) * 1_000_000 + int(micros)


def decoded(text: Any) -> str:  # noqa: ANN401  (a reply)
    """A reply as text."""
    return text.decode() if isinstance(text, bytes) else str(text or "")
