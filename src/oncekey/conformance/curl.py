"""An exchange as a person repeats and reads it. Credentials become shell variables, so that a report can be mailed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from typing import Final

from oncekey.conformance.clauses import Exchange
from oncekey.conformance.shots import Answer, Header, Shot
from oncekey.conformance.target import is_secret

_LONGEST: Final = 1000


def curl_line(shot: Shot) -> str:
    """The command that sends a request again."""
    words = ["curl", "-i", "-X", shot.method, shlex.quote(str(shot.address))]
    for header in shot.headers:
        words += ["-H", _quoted(header)]
    if shot.chunked:
        words += ["-H", "'Transfer-Encoding: chunked'"]
    if shot.body:
        text = shot.body.decode("utf-8", "backslashreplace")
        words += ["--data-binary", shlex.quote(text) if len(text) <= _LONGEST else "@body"]
    return " ".join(words)


def steps(exchanges: Iterable[Exchange]) -> list[str]:
    """The commands of a finding in order, each once, with a comment where curl cannot do what was done."""
    lines: list[str] = []
    for exchange in exchanges:
        line = _done(curl_line(exchange.shot), exchange)
        if not lines or lines[-1] != line:
            lines.append(line)
    return lines


def _done(command: str, exchange: Exchange) -> str:
    """The command in the way in which it was sent, or with a word about it."""
    if exchange.at_once > 1:
        return f"for i in $(seq {exchange.at_once}); do {command} & done; wait"
    return f"{command}  # {exchange.how}" if exchange.how else command


def transcript(exchange: Exchange) -> str:
    """Request and answer as they were on the wire, shortened and without credentials."""
    shot, answer = exchange.shot, exchange.answer
    sent = [f"> {shot.method} {shot.address.target} HTTP/1.1", *(f"> {_shown(line)}" for line in shot.headers)]
    if exchange.how:
        sent.insert(0, f"# {exchange.how}")
    return "\n".join([*sent, ">", *_body(">", shot.body), *_answered(answer)])


def _answered(answer: Answer) -> list[str]:
    if not answer.status:
        return [f"< (no answer: {answer.reason})"]
    head = [f"< {answer.status} {answer.reason}".rstrip(), *(f"< {_shown(line)}" for line in answer.headers)]
    return [*head, "<", *_body("<", answer.body)]


def _body(sign: str, body: bytes) -> list[str]:
    text = body.decode("utf-8", "backslashreplace")
    shown = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
    return [f"{sign} {line}" for line in shown.splitlines()]


def _shown(header: Header) -> str:
    name, value = header
    return f"{name}: {'(hidden)' if is_secret(name) else value}"


def _quoted(header: Header) -> str:
    name, value = header
    if is_secret(name):
        return f'"{name}: ${re.sub(r"[^A-Z0-9]", "_", name.upper())}"'
    # An empty value would make curl leave the field out.
    return shlex.quote(f"{name}: {value}" if value else f"{name};")
