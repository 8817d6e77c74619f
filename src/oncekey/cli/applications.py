"""The application that a command names by `--app MODULE:NAME`, and where the events of a command go.

An operator's command is a process of its own, and ends before a monitor could scrape it. So it sends its events itself:
as lines of JSON to stderr (`oncekey --log ...`), or to the observers that the application has (`oncekey --observe
MODULE:NAME ...`), of which OpenTelemetry sends what it counted when the process ends. Without either option the command
makes no event. The audit has every change all the same.
"""

from __future__ import annotations

import logging
import sys
from contextvars import ContextVar
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from oncekey.core.errors import ConfigurationError
from oncekey.observe.events import Notify, Observer, telling
from oncekey.observe.logs import JsonLines, Logs

if TYPE_CHECKING:
    from collections.abc import Callable

    from oncekey.once import Once

_SCHEMES: Final = {"sqlite": "sqlite", "postgresql": "postgresql", "mysql": "mariadb", "mariadb": "mariadb"}
PLAIN: Final = "%(asctime)s %(levelname)s %(message)s"
_observers: ContextVar[tuple[Observer, ...]] = ContextVar("oncekey_command_observers", default=())
"""The observers of the command that runs."""


def load(place: str) -> Once:
    """The application that `module:name` names, or one line about what is wrong with it."""
    from oncekey.once import Once

    found = named(place, "--app")
    if not isinstance(found, Once):
        raise ConfigurationError(f"--app {place}: that is a {type(found).__name__}, and a Once is needed")
    return found


def url_of(once: Once, place: str) -> str:
    """The URL of an application's store, for a command that connects to it by itself."""
    source: Any = once.store
    if isinstance(source, str):
        return source
    engines = (source,) if hasattr(source, "url") else getattr(source, "engines", ())  # of SQLAlchemy
    url = engines[0].url if engines else None
    scheme = None if url is None else _SCHEMES.get(url.get_backend_name())
    if url is None or scheme is None:
        raise ConfigurationError(
            f"--app {place} keeps its keys in a {type(source).__name__}, whose address only the application has: say "
            "--store URL; in a project of Django's, use `manage.py oncekey`"
        )
    return str(url.set(drivername=scheme).render_as_string(hide_password=False))


def named(place: str, option: str) -> object:
    """The object that `module:name` names; `option` is the option that names it."""
    module_name, colon, path = place.partition(":")
    if not colon or not module_name or not path:
        raise ConfigurationError(f"{option} {place}: say module:name, as in {option} shop.main:once")
    found: Any = _module(module_name, option)
    for name in path.split("."):
        if not hasattr(found, name):
            raise ConfigurationError(f"{option} {place}: {module_name} has no {path}")
        found = getattr(found, name)
    return cast("object", found)


def begin(*, log: bool, observe: str | None) -> Callable[[], None]:
    """Send events to the observers that the options name, until the returned function is called."""
    before, wanted = _observers.get(), () if observe is None else _named(observe)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    events = logging.getLogger("oncekey.events")
    if log:
        events.addHandler(handler)
        events.setLevel(logging.INFO)
        events.propagate = False  # a command that logs would print each event a second time, in words
        wanted = (*wanted, Logs(events))
    _observers.set(wanted)

    def end() -> None:
        _observers.set(before)
        if log:
            events.removeHandler(handler)
            events.setLevel(logging.NOTSET)
            events.propagate = True

    return end


def notify() -> Notify | None:
    """The function that sends the events of this command; None: there is no observer."""
    return telling(_observers.get())


def joined(once: Once) -> Once:
    """The application, with the command's observers added to its own."""
    once.observe(*(one for one in _observers.get() if one not in once.observers))
    return once


def log_plainly() -> None:
    """Log what a long-running command does, in words."""
    logging.basicConfig(level=logging.INFO, format=PLAIN, stream=sys.stderr)


def _named(place: str) -> tuple[Observer, ...]:
    """The observers of an application, or the one that `module:name` names."""
    from oncekey.once import Once

    found = named(place, "--observe")
    if isinstance(found, Once):
        return found.observers
    if not callable(found):
        kind = type(found).__name__
        raise ConfigurationError(f"--observe {place}: that is a {kind}, and a Once or an observer is needed")
    return (found,)


def _module(name: str, option: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does: the command itself is installed elsewhere
    try:
        there = find_spec(name)
    except (ImportError, ValueError):
        there = None
    if there is None:
        raise ConfigurationError(f"{option}: there is no module {name} here or among the installed ones")
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigurationError(f"{option}: {name} cannot be imported: {error}") from error
