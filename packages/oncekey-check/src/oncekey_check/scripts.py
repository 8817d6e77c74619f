"""Writes the reproduction of a finding: the command, the exchanges as `curl` lines, and a script with fresh keys.

Credentials become shell variables, so that a report can be shared. In a text, a variable is its name between two NUL
characters, which no header, URL or printable body contains.
"""

from __future__ import annotations

import gzip
import re
import shlex
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from oncekey_check.carrier import ANY_UUID, KEY, MARKER, Header
from oncekey_check.clauses import CheckProfile, Exchange, Way
from oncekey_check.raw_http import Answer, RawRequest
from oncekey_check.target import Target, is_secret

_UUID: Final = re.compile(r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}([0-9a-f]{12})", re.IGNORECASE)
_RUN: Final = re.compile(r"[0-9a-f]{8,}", re.IGNORECASE)
_ODD: Final = re.compile(r"[^\x20-\x7e\x00]+")
_ESCAPED: Final = re.compile(r'(["\\$])')
_PART, _WHOLE = 12, 32


def variable(name: str) -> str:
    """A variable inside a text."""
    return f"\0{name}\0"


def quoted(text: str) -> str:
    """A text as one word of a shell."""
    pieces = text.split("\0")
    if len(pieces) == 1:
        return shlex.quote(text)
    literals, names = pieces[::2], pieces[1::2]
    if any(sign in literal for literal in literals for sign in "!`"):
        words = [shlex.quote(literal) if literal else "" for literal in literals]
        return "".join(f'{word}"{_expanded(name)}"' for word, name in zip(words, names, strict=False)) + words[-1]
    escaped = [_ESCAPED.sub(r"\\\1", literal) for literal in literals]
    inside = "".join(f"{word}{_expanded(name)}" for word, name in zip(escaped, names, strict=False)) + escaped[-1]
    return f'"{inside}"'


def octets(text: str) -> str:
    """A header line in which every byte outside ASCII is written by `printf`, whatever the terminal's encoding."""
    return _ODD.sub(lambda met: variable(f"(printf '{_octal(met[0])}')"), text)


@dataclass(frozen=True, slots=True)
class Secrets:
    """The variables of the credentials."""

    target: Target

    def line(self, header: Header) -> str:
        """A header line in which a credential is a variable."""
        name, value = header
        if not is_secret(name):
            return f"{name}: {value}"
        return f"{name}: {variable(self.name(header))}"

    def name(self, header: Header) -> str:
        """The variable of a credential; the other tenant has separate variables."""
        plain = re.sub(r"[^A-Z0-9]", "_", header[0].upper())
        if header in self.target.other_tenant:
            return f"OTHER_{plain}"
        return f"RENEWED_{plain}" if header in self.target.same_caller else plain


@dataclass(frozen=True, slots=True)
class FreshKeys:
    """The random parts of the keys that were sent, each with the variable that replaces it."""

    parts: dict[str, str]

    @classmethod
    def of(cls, values: Iterable[str]) -> FreshKeys:
        """Find the random parts. Only these are replaced, because the format of the key must not change."""
        found: dict[str, str] = {}
        for value in values:
            runs = [met[1] for met in _UUID.finditer(value)]
            runs += _RUN.findall(_UUID.sub(" ", value))
            for run in runs:
                part = (run[:_WHOLE][-_PART:] if len(run) >= _PART else run[:8]).lower()
                found.setdefault(part, f"K{len(found) + 1}")
        return cls(found)

    def lines(self) -> list[str]:
        """The commands that set the variables."""
        if not self.parts:
            return []
        # A part that consists of digits may have to remain numeric.
        made = [
            f"{name}=$({'digits' if part.isdecimal() else 'fresh'} {len(part)})" for part, name in self.parts.items()
        ]
        return [
            "fresh() { od -An -N\"$(($1 / 2))\" -tx1 /dev/urandom | tr -d ' \\n'; }",
            *(['digits() { LC_ALL=C tr -dc 0-9 < /dev/urandom | head -c "$1"; }'] if self._has_digits else []),
            *made,
        ]

    @property
    def _has_digits(self) -> bool:
        return any(part.isdecimal() for part in self.parts)

    def put_in(self, text: str) -> str:
        """A text with variables instead of the random parts."""
        for part, name in self.parts.items():
            capital = variable(f'(printf %s "${name}" | tr a-f A-F)')
            text = text.replace(part, variable(name))
            text = text.replace(part.upper(), capital)
        return text


def _expanded(name: str) -> str:
    return f"${name}" if name.startswith("(") else f"${{{name}}}"


def _octal(text: str) -> str:
    return "".join(f"\\{byte:03o}" for byte in text.encode("latin-1", "replace"))


_LONGEST: Final = 1000
_MOST: Final = 6


def curl_line(request: RawRequest, target: Target, fresh: Callable[[str], str] = str) -> str:
    """The command that sends a request again; `fresh` replaces used keys with variables."""
    headers, body, address = request.as_sent()
    secrets = Secrets(target)
    words = ["curl", "-si", "-X", request.method, quoted(fresh(str(address)))]
    if any(sign in str(address) for sign in "[]{}"):
        words.append("--globoff")
    if address.cacert:
        words += ["--cacert", quoted(address.cacert)]
    for header in headers:
        # curl would omit a header with an empty value.
        line = secrets.line(header) if header[1] else f"{header[0]};"
        words += ["-H", quoted(fresh(octets(line)))]
    if request.chunked:
        words += ["-H", "'Transfer-Encoding: chunked'"]
    if body and not any(name.lower() == "content-type" for name, _ in headers):
        words += ["-H", "Content-Type:"]
    if text := printable(body):
        words += ["--data-raw", quoted(fresh(text))]
    elif body:
        return f"{unpacked(body)} | {' '.join([*words, '--data-binary', '@-'])}"
    return " ".join(words)


def unpacked(body: bytes) -> str:
    """The command that prints a body that no shell word can contain."""
    return f"printf %s {b64encode(gzip.compress(body, mtime=0)).decode()} | base64 -d | gunzip"


def printable(body: bytes) -> str:
    """The body as text that fits into a shell word; empty if it does not."""
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return ""
    return text if len(text) <= _LONGEST and "\0" not in text and "\r" not in text else ""


def shortened(exchanges: Sequence[Exchange]) -> Sequence[Exchange]:
    """The exchanges that a report shows: the first ones and the last."""
    return exchanges if len(exchanges) <= _MOST else (*exchanges[: _MOST - 2], *exchanges[-2:])


def transcript(exchange: Exchange) -> str:
    """Request and response as they were on the wire, shortened and without credentials."""
    request, answer = exchange.request, exchange.answer
    headers, body, address = request.as_sent()
    sent = [f"> {request.method} {address.target} HTTP/1.1", *(f"> {_shown(line)}" for line in headers)]
    if exchange.how:
        sent.insert(0, f"# {exchange.how}")
    return "\n".join([*sent, ">", *_body(">", body), *_answered(request, answer)])


def _answered(request: RawRequest, answer: Answer) -> list[str]:
    if not answer.status:
        return [f"< (no response: {answer.reason})"]
    lines = request.carrier.as_received(answer.headers)
    head = [f"< {answer.status} {answer.reason}".rstrip(), *(f"< {_shown(line)}" for line in lines)]
    return [*head, "<", *_body("<", answer.body)]


def _body(sign: str, body: bytes) -> list[str]:
    text = body.decode("utf-8", "backslashreplace")
    shown = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
    return [f"{sign} {line}" for line in shown.splitlines()]


def _shown(header: Header) -> str:
    name, value = header
    return f"{name}: {'(hidden)' if is_secret(name) else value}"


_COMMANDS: Final = ("crash_command", "store_down_command", "store_up_command")


def invocation(target: Target, profile: CheckProfile) -> str:
    """The command that repeats the run."""
    words = [word for option, value in options(target, profile) for word in (option, value) if word]
    return " ".join(["oncekey-check", quoted(str(target.address)), *words])


def options(target: Target, profile: CheckProfile) -> list[tuple[str, str]]:
    """Every option that is not at its default, with its value as a shell word."""
    usual = Target(address=target.address, body=target.body)
    return [
        ("--profile", profile.value),
        ("--body", _body_option(target.body)),
        *([("--method", quoted(target.method))] if target.method != usual.method else []),
        *_headers(target),
        *_bodies(target),
        *_addresses(target),
        *_carrier(target),
        *((_option(name), quoted(variable(name.upper()))) for name in _COMMANDS if getattr(target, name)),
        *(
            (_option(name), f"{getattr(target, name):g}")
            for name in ("lease", "patience", "timeout", "command_limit")
            if getattr(target, name) != getattr(usual, name)
        ),
        *([("--unsafe-methods", "")] if target.unothers else []),
        *([("--key-optional", "")] if target.key_optional else []),
    ]


def _headers(target: Target) -> Iterator[tuple[str, str]]:
    secrets = Secrets(target)

    def word(line: Header) -> str:
        return quoted(octets(secrets.line(line)))

    yield from (("--header", word(line)) for line in target.headers)
    yield from (("--other-tenant-header", word(line)) for line in target.other_tenant)
    yield from (("--same-caller-header", word(line)) for line in target.same_caller)
    for option, line in (("--slow", target.slow), ("--fail", target.fail), ("--large", target.large)):
        if line is not None:
            yield f"{option}-header", word(line)


def _bodies(target: Target) -> Iterator[tuple[str, str]]:
    for option in ("other_body", "invalid_body", "declined_body"):
        body = getattr(target, option)
        if body is not None:
            yield _option(option), _body_option(body)


def _addresses(target: Target) -> Iterator[tuple[str, str]]:
    given = {
        "--count-url": target.count_address,
        "--other-url": target.other_address,
        "--also-url": target.also_address,
        "--openapi": target.openapi,
    }
    yield from ((option, quoted(str(address))) for option, address in given.items() if address is not None)
    if target.count_pointer:
        yield "--count-pointer", quoted(target.count_pointer)
    if target.address.cacert is not None:
        yield "--cacert", quoted(target.address.cacert)


def _carrier(target: Target) -> Iterator[tuple[str, str]]:
    carrier = target.carrier
    if carrier.member is not None:
        yield "--key-field", quoted(carrier.member)
    if target.key_format != ANY_UUID:
        yield "--key-format", quoted(target.key_format.text)
    if carrier.header != KEY:
        yield "--key-header", quoted(carrier.header)
    if (carrier.marker, carrier.marked_by) != (MARKER, "true"):
        yield "--marker-header", quoted(f"{carrier.marker}: {carrier.marked_by}")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _body_option(body: bytes) -> str:
    return quoted(printable(body)) if printable(body) else f"@FILE  # of {len(body)} bytes"


_SEND: Final = """\
send() { python3 - "$@" <<'EOF'
import socket, ssl, sys, threading, time
how, host, port, trust, many, seconds, sent, *names = sys.argv[1:]
requests = [open(name, "rb").read() for name in names]
requests = requests * int(many) if len(requests) == 1 else requests
gate, answers = threading.Barrier(len(requests)), [b""] * len(requests)
def connect():
    plain = socket.create_connection((host, int(port)), 30)
    if trust == "-":
        return plain
    return ssl.create_default_context(cafile=trust or None).wrap_socket(plain, server_hostname=host)
def answer(line):
    return b"".join(iter(lambda: line.recv(65536), b""))
def one(number):
    data = requests[number]
    with connect() as line:
        if how == "together":
            line.sendall(data[:-1])
            gate.wait()
            line.sendall(data[-1:])
        elif how == "slowly":
            head = data.index(b"\\r\\n\\r\\n") + 4
            size = max(1, (len(data) - head) // 6)
            for start in (0, *range(head, len(data), size)):
                line.sendall(data[start : start + size] if start else data[:head])
                time.sleep(float(seconds))
        else:
            line.sendall(data)
        answers[number] = answer(line)
if how in ("cut", "heard"):
    with connect() as line:
        line.sendall(requests[0][: int(sent)] if int(sent) else requests[0])
        if how == "heard":
            line.recv(1)
        time.sleep(float(seconds))
    time.sleep(0.3 if int(sent) else 0)
elif how == "pipelined":
    with connect() as line:
        line.sendall(b"".join(requests))
        answers[0] = answer(line)
else:
    threads = [threading.Thread(target=one, args=[number]) for number in range(len(requests))]
    for thread in threads:
        thread.start()
        time.sleep(float(seconds) if how == "overlapping" else 0)
    for thread in threads:
        thread.join()
sys.stdout.buffer.write(b"\\n".join(answers) + b"\\n")
EOF
}"""
_COUNT: Final = (
    "python3 -c 'import functools, json, sys; "
    'steps = [step.replace("~1", "/").replace("~0", "~") for step in sys.argv[1].split("/")[1:]]; '
    "into = lambda found, step: found[int(step)] if isinstance(found, list) else found[step]; "
    "found = functools.reduce(into, steps, json.load(sys.stdin)); "
    "print(len(found) if isinstance(found, list) else found)'"
)


def script(target: Target, exchanges: Sequence[Exchange]) -> list[str]:
    """The lines of a script for `bash`."""
    writer = _Writer(target, exchanges)
    steps = list(writer.steps())
    return [*writer.preamble(), *steps, *writer.ending()]


class _Writer:
    """Writes one script. While it writes the steps, it collects the definitions of the preamble."""

    def __init__(self, target: Target, exchanges: Sequence[Exchange]) -> None:
        self._target, self._exchanges = target, exchanges
        self._secrets = Secrets(target)
        self._fresh = FreshKeys.of(
            value for exchange in exchanges for name, value in exchange.request.headers if name.lower() == KEY.lower()
        )
        self._sends = False
        self._commands: set[str] = set()

    def preamble(self) -> list[str]:
        """The definitions before the first request."""
        needed = (*self._headers(), *(self._count_headers() if self._counts else ()))
        names = {self._secrets.name(line): f"the header {line[0]}" for line in needed if is_secret(line[0])}
        names |= {_variable(option): f"the command of {option}" for option in sorted(self._commands)}
        lines = [f': "${{{name}:?set it to {_meaning(name, what)}}}"' for name, what in names.items()]
        lines += self._fresh.lines()
        if self._sends:
            lines += ["DIR=$(mktemp -d)", *_SEND.splitlines()]
        if self._counts:
            lines += [f"count() {{ {self._counting()}; }}", 'echo "effects before: $(count)"']
        return lines

    def ending(self) -> list[str]:
        """The lines after the last request."""
        return ['echo "effects after: $(count)"'] if self._counts else []

    def steps(self) -> Iterator[str]:
        """The requests in order; a repeated one is a loop."""
        left = list(self._exchanges)
        while left:
            mode = left[0].mode
            group, left = left[: mode.many], left[mode.many :]
            lines = self._sent(group)
            pauses: list[float] = []
            while mode.way is Way.PLAIN and left and _same(left[0], group[0]):
                pauses.append(left[0].mode.seconds)
                left = left[1:]
            if not pauses:
                yield from lines
            else:
                pause = f"; sleep {max(pauses):.2f}" if any(pauses) else ""
                yield f"for i in $(seq {len(pauses) + 1}); do {'; '.join(lines)}{pause}; done"

    def _sent(self, group: Sequence[Exchange]) -> list[str]:
        mode, request = group[0].mode, group[0].request
        command = curl_line(request, self._target, self._fresh.put_in)
        self._commands |= set(mode.after)
        ran = [f'bash -c "${_variable(option)}"' for option in mode.after]
        match mode.way:
            case Way.PLAIN:
                return [*ran, *([self._up(request)] if ran else []), f"{command}; echo"]
            case Way.INTERRUPTED:
                return [f"{command} &", f"sleep {mode.seconds:.2f}", *ran, "wait", self._up(request)]
            case Way.CUT:
                head, whole = len(request.head()), len(request.wire())
                # Counted from the end if possible: the reader's credentials have another length.
                sent = 0 if mode.sent >= whole else mode.sent if mode.sent <= head else mode.sent - whole
                return self._sending("heard" if mode.listened else "cut", [request], mode.seconds, sent)
            case Way.TOGETHER | Way.PIPELINED | Way.SLOWLY | Way.OVERLAPPING:
                return self._sending(mode.way.value, [one.request for one in group], mode.seconds, 0)

    def _sending(self, how: str, requests: list[RawRequest], seconds: float, sent: int) -> list[str]:
        self._sends = True
        distinct = list(dict.fromkeys(requests))
        address = requests[0].address
        trust = "-" if address.scheme == "http" else quoted(address.cacert or "")
        lines = [line for number, request in enumerate(distinct, 1) for line in self._written(request, number)]
        names = [f'"$DIR/{distinct.index(request) + 1}"' for request in (requests if len(distinct) > 1 else distinct)]
        words = [how, address.host, str(address.port), trust, str(len(requests)), f"{seconds:.2f}", str(sent)]
        return [*lines, " ".join(["send", *words, *names])]

    def _written(self, request: RawRequest, number: int) -> list[str]:
        """The commands that write the bytes of a request to a file."""
        headers, _, _ = request.as_sent()
        hidden = {f"{name}: {value}": self._secrets.line((name, value)) for name, value in headers}
        lines = [quoted(self._fresh.put_in(octets(hidden.get(line, line)))) for line in request.lines()]
        body = request.wire()[len(request.head()) :]
        head = f"printf '%s\\r\\n' {' '.join(lines)} '' > \"$DIR/{number}\""
        return [head, f'{self._body(body)} >> "$DIR/{number}"'] if body else [head]

    def _body(self, body: bytes) -> str:
        try:
            text = body.decode("ascii")
        except UnicodeDecodeError:
            return unpacked(body)
        return unpacked(body) if "\0" in text or "\r" in text else f"printf %s {quoted(self._fresh.put_in(text))}"

    def _up(self, request: RawRequest) -> str:
        """Wait until the server listens again."""
        address = quoted(str(request.as_sent()[2]))
        return f"for i in $(seq 300); do curl -s -o /dev/null {address} && break; sleep 0.2; done"

    @property
    def _counts(self) -> bool:
        return self._target.count_address is not None

    def _counting(self) -> str:
        address = self._target.count_address
        assert address is not None
        command = curl_line(RawRequest("GET", address, tuple(self._count_headers())), self._target).replace(
            " -si ", " -s "
        )
        return f"{command} | {_COUNT} {quoted(self._target.count_pointer)}"

    def _headers(self) -> Iterator[Header]:
        for exchange in self._exchanges:
            yield from exchange.request.headers

    def _count_headers(self) -> Iterator[Header]:
        return (line for line in self._target.headers if line[0].lower() != "content-type")


def _same(one: Exchange, two: Exchange) -> bool:
    return one.request == two.request and replace(one.mode, seconds=0.0) == replace(two.mode, seconds=0.0)


def _meaning(name: str, what: str) -> str:
    if what.startswith("the command"):
        return what
    whose = {"OTHER_": ", as the other tenant", "RENEWED_": ", renewed"}
    return f"the value of {what}{next((words for begin, words in whose.items() if name.startswith(begin)), '')}"


def _variable(option: str) -> str:
    return re.sub(r"[^A-Z]", "_", option.strip("-").upper())
