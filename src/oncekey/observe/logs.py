"""Events as structured log lines: `Once(..., observers=[Logs()])`.

Each line has its fields in `record.oncekey`, for any formatter; `JsonLines` writes them as one JSON object. A key is
logged as its digest. Successful requests are DEBUG, because a busy application counts them with metrics.
"""

from __future__ import annotations

import json
import logging
from dataclasses import fields
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, assert_never

from oncekey.core.model import Code, State
from oncekey.observe import events


class Logs:
    """An observer that writes a line for each event."""

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self._log = logger or logging.getLogger("oncekey.events")

    def __call__(self, event: events.Event) -> None:
        """Write the line."""
        level = level_of(event)
        if self._log.isEnabledFor(level):
            known = fields_of(event)
            pairs = " ".join(f"{name}={value}" for name, value in known.items() if name != "event")
            self._log.log(level, "oncekey: %s %s", known["event"], pairs, extra={"oncekey": known})


def level_of(event: events.Event) -> int:
    """The log level of an event: ERROR if an operator has to act."""
    match event:
        case (
            events.Doubted()
            | events.GivenUp()
            | events.Contradicted()
            | events.Buried()
            | events.StoreFailed()
            | events.Bypassed()
        ):
            return logging.ERROR
        case events.Swept() | events.Unsettled() | events.ShortLease():
            return logging.WARNING
        case events.Refused():
            return logging.WARNING if event.code is Code.KEY_REUSED else logging.DEBUG
        case events.Settled():
            return logging.ERROR if event.to is State.UNKNOWN else logging.DEBUG
        case events.Messaged():
            return logging.DEBUG if event.status < HTTPStatus.BAD_REQUEST else logging.WARNING
        case events.Resolved() | events.Reaped() | events.Operated():
            return logging.INFO
        case events.Consulted():
            return logging.WARNING if event.found is events.Found.REFUSED else logging.DEBUG
        case events.Beat():
            return logging.INFO if event.leaving else logging.DEBUG
        case (
            events.Reserved()
            | events.Replayed()
            | events.TurnedAway()
            | events.Keyless()
            | events.LookedUp()
            | events.Stepped()
            | events.Delivered()
            | events.Asked()
        ):
            return logging.DEBUG
        case _:
            assert_never(event)


def fields_of(event: events.Event) -> dict[str, Any]:
    """The event's name and all its fields, as plain values; the key as its digest."""
    known: dict[str, Any] = {"event": _name(type(event).__name__)}
    for one in fields(event):
        value = getattr(event, one.name)
        if isinstance(value, events.About):
            known |= {"operation": value.operation, "tenant": value.tenant, "key_digest": value.key_digest}
            known["incarnation"] = str(value.incarnation)
            if value.effects is not None:
                known["effects"] = value.effects.value
        elif value is not None:
            known[one.name] = getattr(value, "value", value)
    return known


class JsonLines(logging.Formatter):
    """One JSON object per line: time, level, logger, message, and the fields of an event."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"at": at, "level": record.levelname.lower(), "logger": record.name, "message": record.getMessage()}
        return json.dumps({**line, **getattr(record, "oncekey", {})}, default=str)


def _name(kind: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in kind).lstrip("_")
