"""An exchange as a person repeats and reads it. Credentials become shell variables, so that a report can be mailed."""

from __future__ import annotations

import gzip
from base64 import b64encode
from collections.abc import Callable, Sequence
from typing import Final

from oncekey.conformance.clauses import Exchange
from oncekey.conformance.shell import Secrets, octets, quoted
from oncekey.conformance.shots import Answer, Header, Shot
from oncekey.conformance.target import Target, is_secret

_LONGEST: Final = 1000
_MOST: Final = 6


def curl_line(shot: Shot, target: Target, fresh: Callable[[str], str] = str) -> str:
    """The command that sends a request again; `fresh` puts variables in the place of used keys."""
    headers, body = shot.carrier.dressed(shot.headers, shot.body)
    secrets = Secrets(target)
    words = ["curl", "-si", "-X", shot.method, quoted(fresh(str(shot.address)))]
    if any(sign in str(shot.address) for sign in "[]{}"):
        words.append("--globoff")
    if shot.address.cacert:
        words += ["--cacert", quoted(shot.address.cacert)]
    for header in headers:
        # An empty value would make curl leave the field out.
        line = secrets.line(header) if header[1] else f"{header[0]};"
        words += ["-H", quoted(fresh(octets(line)))]
    if shot.chunked:
        words += ["-H", "'Transfer-Encoding: chunked'"]
    if body and not any(name.lower() == "content-type" for name, _ in headers):
        words += ["-H", "Content-Type:"]
    if text := printable(body):
        words += ["--data-raw", quoted(fresh(text))]
    elif body:
        return f"{unpacked(body)} | {' '.join([*words, '--data-binary', '@-'])}"
    return " ".join(words)


def unpacked(body: bytes) -> str:
    """The command that prints a body which no shell word can hold."""
    return f"printf %s {b64encode(gzip.compress(body, mtime=0)).decode()} | base64 -d | gunzip"


def printable(body: bytes) -> str:
    """The body as a text that fits into a shell word, or nothing."""
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return ""
    return text if len(text) <= _LONGEST and "\0" not in text and "\r" not in text else ""


def shortened(exchanges: Sequence[Exchange]) -> Sequence[Exchange]:
    """The exchanges that a reader is shown: the first ones and the last."""
    return exchanges if len(exchanges) <= _MOST else (*exchanges[: _MOST - 2], *exchanges[-2:])


def transcript(exchange: Exchange) -> str:
    """Request and answer as they were on the wire, shortened and without credentials."""
    shot, answer = exchange.shot, exchange.answer
    headers, body = shot.carrier.dressed(shot.headers, shot.body)
    sent = [f"> {shot.method} {shot.address.target} HTTP/1.1", *(f"> {_shown(line)}" for line in headers)]
    if exchange.how:
        sent.insert(0, f"# {exchange.how}")
    return "\n".join([*sent, ">", *_body(">", body), *_answered(shot, answer)])


def _answered(shot: Shot, answer: Answer) -> list[str]:
    if not answer.status:
        return [f"< (no answer: {answer.reason})"]
    lines = shot.carrier.worn(answer.headers)
    head = [f"< {answer.status} {answer.reason}".rstrip(), *(f"< {_shown(line)}" for line in lines)]
    return [*head, "<", *_body("<", answer.body)]


def _body(sign: str, body: bytes) -> list[str]:
    text = body.decode("utf-8", "backslashreplace")
    shown = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
    return [f"{sign} {line}" for line in shown.splitlines()]


def _shown(header: Header) -> str:
    name, value = header
    return f"{name}: {'(hidden)' if is_secret(name) else value}"
