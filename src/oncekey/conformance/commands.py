"""Commands that the owner of an API lends to the tester: they kill a server, or stop and start its store.

A command is run without a shell, in a session of its own, and for a limited time.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from threading import Thread
from typing import Final

from oncekey.conformance import shots
from oncekey.conformance.clauses import Exchange, Need, UndecidedError
from oncekey.conformance.manner import Manner
from oncekey.conformance.probe import Probe
from oncekey.conformance.shots import Answer, Shot
from oncekey.conformance.sighting import CannotCheckError

STORE_UP: Final = "--store-up-command"

_POLL: Final = 0.1
_ONE_ANSWER: Final = 2.0
_GATEWAY: Final = (502, 503, 504)
_SHOWN: Final = 300


def crash(probe: Probe) -> None:
    """Kill the server, and return when it answers again."""
    _run(Need.CRASH, probe.target.crash_command, probe.target.command_limit)
    _wait_until_back(probe)


@contextmanager
def store_down(probe: Probe) -> Iterator[None]:
    """The store is stopped for as long as the block lasts, and is started again whatever happens in it."""
    target = probe.target
    _run(Need.OUTAGE, target.store_down_command, target.command_limit)
    try:
        yield
    finally:
        try:
            _run(STORE_UP, target.store_up_command, target.command_limit)
        except UndecidedError as error:
            raise CannotCheckError(f"the store is down, and nothing more can be checked: {error}") from None


def meanwhile(probe: Probe, shot: Shot, delay: float, act: Callable[[], None]) -> tuple[Answer, bool]:
    """Send a request, and do something else while it runs. Also: whether it was unanswered until then."""
    answers = [shots.silence("it was not answered")]

    def send() -> None:
        answers[0] = shots.fire(shot, probe.target.timeout)

    thread = Thread(target=send, daemon=True)
    thread.start()
    thread.join(delay)
    running = thread.is_alive()
    act()
    thread.join(probe.target.timeout)
    probe.sent += 1
    return replace(answers[0], headers=probe.target.carrier.read(answers[0].headers)), running


def note(probe: Probe, place: int, exchange: Exchange) -> None:
    """Put an exchange into the trail of the present clause."""
    probe.trail.insert(place, exchange)


def ran_before(probe: Probe, place: int, *options: str) -> None:
    """Say of an exchange in the trail that commands were run before it."""
    exchange = probe.trail[place]
    manner = Manner(exchange.manner.way, exchange.manner.many, exchange.manner.seconds, after=options)
    probe.trail[place] = replace(exchange, how=f"after {' and '.join(options)}", manner=manner)


def _run(option: str, words: tuple[str, ...], limit: float) -> None:
    # A file and no pipe: a server that the command starts keeps its output open for as long as it lives.
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(  # noqa: S603  (the owner of the API gave the command for this)
                words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        except OSError as error:
            raise UndecidedError(f"{option} cannot be run ({error.strerror})", option) from None
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise UndecidedError(f"{option} took longer than {limit:g} s", "--command-limit") from None
        if code:
            output.seek(0)
            said = " ".join(output.read().decode("utf-8", "replace").split())[-_SHOWN:]
            raise UndecidedError(f"{option} ended with code {code}{f': {said}' if said else ''}", option)


def _wait_until_back(probe: Probe) -> None:
    ends = time.monotonic() + probe.target.command_limit
    shot = Shot("OPTIONS", probe.target.address)
    while time.monotonic() < ends:
        status = shots.fire(shot, _ONE_ANSWER).status
        if status and status not in _GATEWAY:
            return
        time.sleep(_POLL)
    raise UndecidedError(
        f"the server did not answer within {probe.target.command_limit:g} s after {Need.CRASH}", "--command-limit"
    )
