"""The script that repeats a finding: the same requests in the same way, with fresh keys and own credentials."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from oncekey.conformance.carrier import KEY
from oncekey.conformance.clauses import Exchange
from oncekey.conformance.curl import curl_line, unpacked
from oncekey.conformance.manner import Way
from oncekey.conformance.shell import FreshKeys, Secrets, octets, quoted
from oncekey.conformance.shots import Header, Shot
from oncekey.conformance.target import Target, is_secret

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
    """One script. It learns what it needs at the top while it writes the steps."""

    def __init__(self, target: Target, exchanges: Sequence[Exchange]) -> None:
        self._target, self._exchanges = target, exchanges
        self._secrets = Secrets(target)
        self._fresh = FreshKeys.of(
            value for exchange in exchanges for name, value in exchange.shot.headers if name.lower() == KEY.lower()
        )
        self._sends = False
        self._commands: set[str] = set()

    def preamble(self) -> list[str]:
        """What must be there before the first request."""
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
        """What is done after the last request."""
        return ['echo "effects after: $(count)"'] if self._counts else []

    def steps(self) -> Iterator[str]:
        """The requests in order; the same one again and again is a loop."""
        left = list(self._exchanges)
        while left:
            manner = left[0].manner
            group, left = left[: manner.many], left[manner.many :]
            lines = self._sent(group)
            pauses: list[float] = []
            while manner.way is Way.PLAIN and left and _same(left[0], group[0]):
                pauses.append(left[0].manner.seconds)
                left = left[1:]
            if not pauses:
                yield from lines
            else:
                pause = f"; sleep {max(pauses):.2f}" if any(pauses) else ""
                yield f"for i in $(seq {len(pauses) + 1}); do {'; '.join(lines)}{pause}; done"

    def _sent(self, group: Sequence[Exchange]) -> list[str]:
        manner, shot = group[0].manner, group[0].shot
        command = curl_line(shot, self._target, self._fresh.put_in)
        self._commands |= set(manner.after)
        ran = [f'bash -c "${_variable(option)}"' for option in manner.after]
        match manner.way:
            case Way.PLAIN:
                return [*ran, *([self._up(shot)] if ran else []), f"{command}; echo"]
            case Way.INTERRUPTED:
                return [f"{command} &", f"sleep {manner.seconds:.2f}", *ran, "wait", self._up(shot)]
            case Way.CUT:
                head, whole = len(shot.head()), len(shot.wire())
                # Counted from the end where that is possible: the reader's credentials have another length.
                sent = 0 if manner.sent >= whole else manner.sent if manner.sent <= head else manner.sent - whole
                return self._sending("heard" if manner.listened else "cut", [shot], manner.seconds, sent)
            case Way.TOGETHER | Way.PIPELINED | Way.SLOWLY | Way.OVERLAPPING:
                return self._sending(manner.way.value, [one.shot for one in group], manner.seconds, 0)

    def _sending(self, how: str, shots: list[Shot], seconds: float, sent: int) -> list[str]:
        self._sends = True
        distinct = list(dict.fromkeys(shots))
        address = shots[0].address
        trust = "-" if address.scheme == "http" else quoted(address.cacert or "")
        lines = [line for number, shot in enumerate(distinct, 1) for line in self._written(shot, number)]
        names = [f'"$DIR/{distinct.index(shot) + 1}"' for shot in (shots if len(distinct) > 1 else distinct)]
        words = [how, address.host, str(address.port), trust, str(len(shots)), f"{seconds:.2f}", str(sent)]
        return [*lines, " ".join(["send", *words, *names])]

    def _written(self, shot: Shot, number: int) -> list[str]:
        """The commands that write the bytes of a request to a file."""
        headers, _ = shot.carrier.dressed(shot.headers, shot.body)
        hidden = {f"{name}: {value}": self._secrets.line((name, value)) for name, value in headers}
        lines = [quoted(self._fresh.put_in(octets(hidden.get(line, line)))) for line in shot.lines()]
        body = shot.wire()[len(shot.head()) :]
        head = f"printf '%s\\r\\n' {' '.join(lines)} '' > \"$DIR/{number}\""
        return [head, f'{self._body(body)} >> "$DIR/{number}"'] if body else [head]

    def _body(self, body: bytes) -> str:
        try:
            text = body.decode("ascii")
        except UnicodeDecodeError:
            return unpacked(body)
        return unpacked(body) if "\0" in text or "\r" in text else f"printf %s {quoted(self._fresh.put_in(text))}"

    def _up(self, shot: Shot) -> str:
        """Wait until the server listens again."""
        address = quoted(str(shot.address))
        return f"for i in $(seq 300); do curl -s -o /dev/null {address} && break; sleep 0.2; done"

    @property
    def _counts(self) -> bool:
        return self._target.count_address is not None

    def _counting(self) -> str:
        address = self._target.count_address
        assert address is not None
        command = curl_line(Shot("GET", address, tuple(self._count_headers())), self._target).replace(" -si ", " -s ")
        return f"{command} | {_COUNT} {quoted(self._target.count_pointer)}"

    def _headers(self) -> Iterator[Header]:
        for exchange in self._exchanges:
            yield from exchange.shot.headers

    def _count_headers(self) -> Iterator[Header]:
        return (line for line in self._target.headers if line[0].lower() != "content-type")


def _same(one: Exchange, two: Exchange) -> bool:
    return one.shot == two.shot and replace(one.manner, seconds=0.0) == replace(two.manner, seconds=0.0)


def _meaning(name: str, what: str) -> str:
    if what.startswith("the command"):
        return what
    return f"the value of {what}{', as the other tenant' if name.startswith('OTHER_') else ''}"


def _variable(option: str) -> str:
    return re.sub(r"[^A-Z]", "_", option.strip("-").upper())
