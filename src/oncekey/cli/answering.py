"""Reads the answer, or the result of a call, that an operator gives by the options of a command."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from oncekey.core.errors import ConfigurationError, ResultInvalidError, ResultNotStorableError
from oncekey.core.memo import decode, encode, rejected
from oncekey.core.model import Completed, EntryKind, MemoEntry, Outcome, StoredResponse
from oncekey.core.policy import Policy
from oncekey.core.results import fitted

if TYPE_CHECKING:
    from oncekey.core.model import Headers, Record

_ERRORS: Final = 400
_DEFAULTS: Final = Policy()

Body = Annotated[str | None, typer.Option("--body", help="The answer's body: a file, or - for standard input.")]
ContentType = Annotated[str, typer.Option("--content-type", help="Of the body.")]
Status = Annotated[int | None, typer.Option("--status", min=200, max=599, help="The answer's status code.")]
Header = Annotated[
    list[str] | None,
    typer.Option("--header", help="'Name: value' of the answer; may be given again.", metavar="FIELD"),
]


def answer_of(
    status: int | None, body: str | None, content_type: str, header: list[str] | None, *, final_no: bool
) -> Completed | None:
    """The answer that the client gets from now on; None if the options give none."""
    if status is None:
        if body is not None:
            raise ConfigurationError("an answer has a status: say --status too")
        return None
    if final_no and status < _ERRORS:
        raise ConfigurationError(f"--declined is a failure, and {status} is none: say --status 402 or the like")
    if not final_no and status >= _ERRORS:
        raise ConfigurationError(f"--executed is a success, and {status} is none: say --declined for a final no")
    content = b"" if body is None else _read(body)
    if len(content) > _DEFAULTS.max_response_bytes:
        raise ConfigurationError(f"the body has {len(content)} bytes, and {_DEFAULTS.max_response_bytes} are kept")
    kind: Headers = ((b"content-type", _field(content_type)),) if content else ()
    headers = (*kind, *(_header(line) for line in header or ()))
    return Completed(StoredResponse(status, headers, content), Outcome.FAILURE if final_no else Outcome.SUCCESS)


def result_of(text: str, *, final_no: bool) -> str:
    """The stored form of a call's result, or of the provider's final no."""
    try:
        stored = encode(json.loads(text), _DEFAULTS.max_result_bytes)
    except (ValueError, ResultNotStorableError) as error:
        raise ConfigurationError(f"--result is no JSON that can be stored: {error}") from None
    entry = MemoEntry("-", EntryKind.CALL, stored)
    return rejected(entry).result if final_no else stored


def _read(body: str) -> bytes:
    if body == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(body).read_bytes()
    except OSError as error:
        raise ConfigurationError(f"--body {body} cannot be read: {error.strerror}") from None


def _header(line: str) -> tuple[bytes, bytes]:
    name, colon, value = line.partition(":")
    if not colon or not name.strip().isascii() or not name.strip():
        raise ConfigurationError("--header takes 'Name: value'")
    return _field(name.strip().lower()), _field(value.strip())


def _field(text: str) -> bytes:
    if not text.isprintable():
        raise ConfigurationError("a header field has no control characters")
    try:
        return text.encode("latin-1")
    except UnicodeEncodeError:
        raise ConfigurationError("a header field is Latin-1 text") from None


def checked_by(app: str | None, result: str | None) -> Callable[[Record], str | None]:
    """A check of a result against what the handler's code declares: it returns why the result does not fit, or None."""
    if app is None or result is None:
        return lambda _: None
    from oncekey.cli.worker import load
    from oncekey.workers.tasks import declared_by

    application, value = load(app), decode(encode(json.loads(result), _DEFAULTS.max_result_bytes))

    def check(record: Record) -> str | None:
        handler = application.enrolled.get(record.operation)
        last = record.memo[-1].name if record.memo else None
        phase = last if record.intent is None else record.intent.phase
        declared = None if handler is None or phase is None else declared_by(handler, phase)
        if declared is None:
            return None
        try:
            fitted(value, declared)
        except ResultInvalidError as error:
            return f"--result is {error}, which the handler declares for {phase!r}"
        return None

    return check
