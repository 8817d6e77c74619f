"""The retry matrix: what each answer means for the operation."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, assert_never

from oncekey.client.exchange import Failure, Loss
from oncekey.client.profiles import Sign

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oncekey.client.exchange import Reply
    from oncekey.client.profiles import Profile


class NextMove(StrEnum):
    """What to do after an answer."""

    ACCEPT = "accept"
    """It is the operation's answer."""
    RETRY = "retry"
    """Send the same again after a while; counts as an attempt."""
    WAIT = "wait"
    """It is in progress: ask again with the same key. Bounded by the deadline only."""
    POLL = "poll"
    """Accepted, not finished: look where `Location` points, or ask again with the same key."""
    REDIRECT = "redirect"
    """Send the same to where `Location` points."""
    STOP = "stop"
    """Refused before the key was looked at: the same key may be sent once the caller has corrected the request."""
    EXPIRED = "expired"
    """The server has forgotten the key: the caller has to find out by other means, and not send it again."""
    MISUSED = "misused"
    """The key belongs to another request."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row. `doubt`: after this answer the operation may have happened, although nothing says so."""

    move: NextMove
    doubt: bool = False


_ACCEPT: Final = Row(NextMove.ACCEPT)
_RETRY_UNDONE: Final = Row(NextMove.RETRY)
_RETRY_DOUBTFUL: Final = Row(NextMove.RETRY, doubt=True)
_WAIT: Final = Row(NextMove.WAIT, doubt=True)

BY_SIGN: Final[Mapping[Sign, Row]] = {
    Sign.IN_PROGRESS: _WAIT,
    Sign.UNKNOWN: _WAIT,
    Sign.MISMATCH: Row(NextMove.MISUSED),
    Sign.EXPIRED: Row(NextMove.EXPIRED, doubt=True),
    Sign.NOT_EXECUTED: _RETRY_UNDONE,
    Sign.RETRY: _RETRY_DOUBTFUL,
    Sign.FINAL: _ACCEPT,
}

BY_LOSS: Final[Mapping[Loss, Row]] = {
    Loss.NOT_SENT: _RETRY_UNDONE,
    Loss.LOST: _RETRY_DOUBTFUL,
    Loss.HOPELESS: Row(NextMove.STOP),
}

BY_STATUS: Final[Mapping[int, Row]] = {
    202: Row(NextMove.POLL, doubt=True),
    307: Row(NextMove.REDIRECT),
    308: Row(NextMove.REDIRECT),
    401: Row(NextMove.STOP),
    403: Row(NextMove.STOP),
    407: Row(NextMove.STOP),
    408: _RETRY_DOUBTFUL,
    423: _RETRY_UNDONE,
    425: _RETRY_UNDONE,
    429: _RETRY_UNDONE,
    501: _ACCEPT,
    505: _ACCEPT,
}
"""Statuses that differ from their class; of the others, 5xx are tried again and everything else is the answer."""

_ACCEPTED: Final = 202
_CONFLICT: Final = 409
_FIRST_ERROR: Final = 400
_FIRST_SERVER_ERROR: Final = 500


def next_move(reply: Reply | Failure, profile: Profile) -> Row:
    """The row for an answer, or for the lack of one."""
    if isinstance(reply, Failure):
        return BY_LOSS[reply.loss]
    # First, because a stored 408 or 500 comes back as often as the key is sent.
    if profile.is_replay(reply):
        return _ACCEPT
    if reply.status >= _FIRST_ERROR and (sign := profile.read(reply)) is not None:
        return BY_SIGN[sign]
    match reply.status:
        case status if status == _CONFLICT:
            # Another server's wording, but it says that waiting helps: it is in progress.
            return _ACCEPT if reply.field("Retry-After") is None else _WAIT
        case status if status == _ACCEPTED:
            return BY_STATUS[status] if _unfinished(reply, profile) else _ACCEPT
        case status if status in BY_STATUS:
            return BY_STATUS[status]
        case status:
            return _RETRY_DOUBTFUL if status >= _FIRST_SERVER_ERROR else _ACCEPT


def polled(reply: Reply | Failure) -> NextMove:
    """The meaning of a status resource's answer: poll again, or it is over."""
    if isinstance(reply, Failure):
        return NextMove.WAIT
    match reply.status:
        case 202 | 408 | 423 | 425 | 429:
            return NextMove.WAIT
        case status if status >= _FIRST_SERVER_ERROR:
            return NextMove.WAIT
        case _:
            return NextMove.WAIT if reply.field("Retry-After") is not None else NextMove.ACCEPT


def is_ours(reply: Reply, profile: Profile) -> bool:
    """Whether a 202 means "in progress under this key", so that the answer is fetched with the key."""
    sign = profile.read(reply)
    match sign:
        case Sign.IN_PROGRESS | Sign.UNKNOWN:
            return True
        case None | Sign.MISMATCH | Sign.EXPIRED | Sign.NOT_EXECUTED | Sign.RETRY | Sign.FINAL:
            return False
        case _:
            assert_never(sign)


def _unfinished(reply: Reply, profile: Profile) -> bool:
    """Whether the operation is not finished; a 202 that does not say when to come back is the final answer."""
    return reply.field("Retry-After") is not None or is_ours(reply, profile)
