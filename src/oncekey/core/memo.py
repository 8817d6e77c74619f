"""The memo: the finished steps of a phased handler in order, and the stored form of their results (H1, H4).

A resumed handler runs from its beginning. For each step that it reaches, the script returns the stored
entry, or None for a new step; a step that does not match the stored one ends the run.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import date, datetime, timedelta
from decimal import Decimal
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, Final
from uuid import UUID

from oncekey.core.envelopes import described, key_of_text
from oncekey.core.errors import ConfigurationError, RecordUnreadableError, ReplayDivergedError, ResultNotStorableError
from oncekey.core.model import LONGEST_NAME, EntryKind, MemoEntry

STARTED: Final = "started"
FINISHED: Final = "finished"
REJECTED: Final = "rejected"
NOT_SENT: Final = "not_sent"
REPEATABLE: Final = timedelta(hours=20)
"""The meaning of `repeatable=True`: most providers remember a key for a day; a margin is subtracted (H3)."""

RESTORE: Final = (
    "deploy code that has the stored steps with their names, kinds and order, then run `oncekey keys release`"
)
"""The remedy for a stored step that the code does not have."""

_TAG: Final = "$"
_ENCODED: Final = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode
"""Like `json.dumps`, which creates a new encoder for every call with options."""


def recovery_point(memo: tuple[MemoEntry, ...]) -> str:
    """The name of the last finished step."""
    return memo[-1].name if memo else STARTED


@dataclass(slots=True)
class Script:
    """The steps of one run against the memo of the runs before."""

    memo: tuple[MemoEntry, ...] = ()
    asked: list[str] = field(default_factory=list)

    def ask(self, name: str, kind: EntryKind) -> MemoEntry | None:
        """The stored entry of the next step, or None if it is new."""
        if not name.isprintable():
            raise ConfigurationError("a step's name is printable text: it is stored, logged and shown to operators")
        if not name or len(name) > LONGEST_NAME:
            raise ConfigurationError(
                f"a step's name has 1 to {LONGEST_NAME} characters, {name[:20]!r}... has {len(name)}"
            )
        if name in {STARTED, FINISHED}:
            raise ConfigurationError(f"{name!r} is where every record begins or ends: choose another name for the step")
        if name in self.asked:
            raise ConfigurationError(
                f"the step name {name!r} is used twice in this operation: give each step its own name"
            )
        place = len(self.asked)
        self.asked.append(name)
        if place >= len(self.memo):
            return None
        stored = self.memo[place]
        if (stored.name, stored.kind) != (name, kind):
            raise ReplayDivergedError(mismatch(stored.kind, stored.name, kind, name))
        return stored

    def learn(self, entry: MemoEntry) -> None:
        """Note that a new step is finished."""
        self.memo = (*self.memo, entry)

    @property
    def used_up(self) -> bool:
        """Whether the run has reached every stored step."""
        return len(self.asked) >= len(self.memo)


def mismatch(stored_kind: EntryKind, stored_name: str, kind: EntryKind, name: str) -> str:
    """The sentence for a stored step that the code does not have, or has elsewhere."""
    return (
        f"the next stored step is the {stored_kind} {stored_name!r}, and the handler has the {kind} {name!r} there: "
        f"{RESTORE}"
    )


def written(value: object) -> str:
    """Plain data as JSON, with a tag for types that JSON lacks.

    Raises:
        TypeError, ValueError, RecursionError: The value is not plain data.
    """
    return _ENCODED(_plain(value))


def encode(value: object, limit: int) -> str:
    """The stored form of a result."""
    try:
        text = written(value)
        size = len(text.encode("utf-8"))
    except (TypeError, ValueError, RecursionError) as error:
        raise ResultNotStorableError(
            f"the result of a step is of type {type(value).__name__} and cannot be stored: {error}"
        ) from None
    if size > limit:
        raise ResultNotStorableError(
            f"a step's result has {size} bytes, and {limit} are allowed: store a reference to it"
        )
    return text


def decode(text: str) -> Any:  # noqa: ANN401  (whatever was encoded)
    """The value of a stored form.

    Raises:
        RecordUnreadableError: It is sealed under a key that this process does not have.
    """
    check_text(text)
    return _DECODED(text)


def check_text(text: str) -> None:
    """Refuse a stored form that is sealed under a key that this process does not have."""
    key_id = key_of_text(text)
    if key_id is not None:
        raise RecordUnreadableError(f"what was stored cannot be read: it is {described(key_id)}")


def digest_of(parameters: object, limit: int) -> str:
    """A digest of a call's parameters: a call with other parameters is a different call (H2)."""
    return blake2b(encode(parameters, limit).encode(), digest_size=16).hexdigest()


def rejected(entry: MemoEntry) -> MemoEntry:
    """The entry of a call that the provider refused for good."""
    return replace(entry, result=json.dumps({_TAG: REJECTED, "v": json.loads(entry.result)}, separators=(",", ":")))


def not_sent(name: str) -> MemoEntry:
    """The entry of a call that was provably not made, after which the handler continued without it."""
    return MemoEntry(name, EntryKind.CALL, json.dumps({_TAG: NOT_SENT, "v": None}, separators=(",", ":")))


def was_not_sent(entry: MemoEntry) -> bool:
    """Whether the stored result is that no call was made."""
    return entry.result.startswith(f'{{"{_TAG}":"{NOT_SENT}"')


def is_rejection(entry: MemoEntry) -> bool:
    """Whether the stored result is the provider's final refusal."""
    return entry.result.startswith(f'{{"{_TAG}":"{REJECTED}"')


_WRITERS: Final[Mapping[type, tuple[str, Callable[[Any], str]]]] = MappingProxyType(
    {
        Decimal: ("decimal", str),
        datetime: ("datetime", datetime.isoformat),
        date: ("date", date.isoformat),
        timedelta: ("microseconds", lambda span: str(span // timedelta(microseconds=1))),
        UUID: ("uuid", str),
        bytes: ("bytes", lambda data: b64encode(data).decode("ascii")),
    }
)
_READERS: Final[Mapping[str, Callable[[Any], Any]]] = MappingProxyType(
    {
        "decimal": Decimal,
        "datetime": datetime.fromisoformat,
        "date": date.fromisoformat,
        "microseconds": lambda text: timedelta(microseconds=int(text)),
        "uuid": UUID,
        "bytes": b64decode,
        "object": dict,
        REJECTED: lambda value: value,
        NOT_SENT: lambda value: value,
    }
)


def _plain(value: Any) -> Any:  # noqa: ANN401  (any value at all)
    if value is None or isinstance(value, str | bool | int | float):
        return value
    for kind in type(value).__mro__:
        if kind in _WRITERS:
            tag, write = _WRITERS[kind]
            return {_TAG: tag, "v": write(value)}
    if isinstance(value, Mapping):
        return _mapping(value)
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    raise TypeError("use plain data: text, numbers, lists, mappings, Decimal, UUID, bytes, dates")


def _mapping(value: Mapping[Any, Any]) -> dict[str, Any]:
    if not all(isinstance(name, str) for name in value):
        raise TypeError("the names in a mapping are text")
    plain = {name: _plain(one) for name, one in value.items()}
    # A mapping that looks like one of our tags is wrapped, so that it is decoded as it was.
    return {_TAG: "object", "v": list(plain.items())} if _TAG in plain else plain


def _object(found: dict[str, Any]) -> Any:  # noqa: ANN401  (whatever was encoded)
    tag = found.get(_TAG)
    return found if tag is None else _READERS[tag](found["v"])


_DECODED: Final = json.JSONDecoder(object_hook=_object).decode
