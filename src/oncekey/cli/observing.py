"""Who hears what a command does: `oncekey --log ...` and `oncekey --observe MODULE:NAME ...`.

An operator's command is a process of its own, and ends before anybody could scrape it. So it tells its events itself:
as lines of JSON on stderr, or to the observers that the application has, of which OpenTelemetry sends what it counted
when the process ends. Without either nobody is told, and no event is made. The audit has every change all the same.
"""

from __future__ import annotations

import logging
import sys
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

from oncekey.core.errors import ConfigurationError
from oncekey.observe.events import telling
from oncekey.observe.logs import JsonLines, Logs

if TYPE_CHECKING:
    from collections.abc import Callable

    from oncekey.observe.events import Observer, Tell
    from oncekey.once import Once

PLAIN: Final = "%(asctime)s %(levelname)s %(message)s"
_observers: ContextVar[tuple[Observer, ...]] = ContextVar("oncekey_command_observers", default=())
"""Of the command that runs."""


def begin(*, log: bool, observe: str | None) -> Callable[[], None]:
    """Tell whoever was asked for, until the returned function is called."""
    before, wanted = _observers.get(), () if observe is None else _named(observe)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    events = logging.getLogger("oncekey.events")
    if log:
        events.addHandler(handler)
        events.setLevel(logging.INFO)
        events.propagate = False  # a command that logs would say the same once more, in words
        wanted = (*wanted, Logs(events))
    _observers.set(wanted)

    def end() -> None:
        _observers.set(before)
        if log:
            events.removeHandler(handler)
            events.setLevel(logging.NOTSET)
            events.propagate = True

    return end


def tell() -> Tell | None:
    """What tells of the moves of this command; None: nobody wants to know."""
    return telling(_observers.get())


def joined(once: Once) -> Once:
    """An application whose own observers are told by a command, and whom the command tells besides."""
    once.observe(*(one for one in _observers.get() if one not in once.observers))
    return once


def log_plainly() -> None:
    """What a command that goes on says of itself, in words."""
    logging.basicConfig(level=logging.INFO, format=PLAIN, stream=sys.stderr)


def _named(place: str) -> tuple[Observer, ...]:
    """The observers of an application, or the one that `module:name` names."""
    from oncekey.cli.worker import named
    from oncekey.once import Once

    found = named(place, "--observe")
    if isinstance(found, Once):
        return found.observers
    if not callable(found):
        kind = type(found).__name__
        raise ConfigurationError(f"--observe {place}: that is a {kind}, and a Once or an observer is needed")
    return (found,)
