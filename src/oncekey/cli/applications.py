"""The application of `--app MODULE:NAME`, and the destination of a command's events.

A command is a separate process that ends before its metrics could be scraped, so it sends its events itself: as lines
of JSON to stderr (`oncekey --log ...`), or to the application's observers (`oncekey --observe MODULE:NAME ...`);
OpenTelemetry exports its counts when the process ends. Without either option the command emits no event. The audit
records every change in any case.
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
from oncekey.observe.events import Notify, Observer, notify_all
from oncekey.observe.logs import JsonLines, Logs

if TYPE_CHECKING:
    from collections.abc import Callable

    from oncekey.once import Once

_SCHEMES: Final = {"sqlite": "sqlite", "postgresql": "postgresql", "mysql": "mariadb", "mariadb": "mariadb"}
PLAIN: Final = "%(asctime)s %(levelname)s %(message)s"
_observers: ContextVar[tuple[Observer, ...]] = ContextVar("oncekey_command_observers", default=())
"""The observers of the running command."""


def load(place: str) -> Once:
    """The application at `module:name`; raises ConfigurationError if there is none."""
    from oncekey.once import Once

    found = named(place, "--app")
    if not isinstance(found, Once):
        raise ConfigurationError(f"--app {place} is a {type(found).__name__}, not a Once")
    return found


def url_of(once: Once, place: str) -> str:
    """The URL of an application's store, for a command that opens its own connection."""
    source: Any = once.store
    if isinstance(source, str):
        return source
    engines = (source,) if hasattr(source, "url") else getattr(source, "engines", ())  # of SQLAlchemy
    url = engines[0].url if engines else None
    scheme = None if url is None else _SCHEMES.get(url.get_backend_name())
    if url is None or scheme is None:
        raise ConfigurationError(
            f"--app {place} stores its keys in a {type(source).__name__}, which has no URL: pass --store URL; in a "
            "Django project, use `manage.py oncekey`"
        )
    return str(url.set(drivername=scheme).render_as_string(hide_password=False))


def named(place: str, option: str) -> object:
    """The object at `module:name`; `option` is the option that was given."""
    module_name, colon, path = place.partition(":")
    if not colon or not module_name or not path:
        raise ConfigurationError(f"{option} {place} is not module:name: write it like {option} shop.main:once")
    found: Any = _module(module_name, option)
    for name in path.split("."):
        if not hasattr(found, name):
            raise ConfigurationError(f"{option} {place}: {module_name} has no {path}")
        found = getattr(found, name)
    return cast("object", found)


def begin(*, log: bool, observe: str | None) -> Callable[[], None]:
    """Send events to the observers of the options, until the returned function is called."""
    before, wanted = _observers.get(), () if observe is None else _named(observe)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    events = logging.getLogger("oncekey.events")
    if log:
        events.addHandler(handler)
        events.setLevel(logging.INFO)
        events.propagate = False  # a command that logs would print each event again as text
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
    """The function that sends this command's events; None if there is no observer."""
    return notify_all(_observers.get())


def joined(once: Once) -> Once:
    """The application, with the command's observers added to its own."""
    once.observe(*(one for one in _observers.get() if one not in once.observers))
    return once


def log_plainly() -> None:
    """Log the activity of a long-running command as text."""
    logging.basicConfig(level=logging.INFO, format=PLAIN, stream=sys.stderr)


def _named(place: str) -> tuple[Observer, ...]:
    """The observers of an application, or the observer at `module:name`."""
    from oncekey.once import Once

    found = named(place, "--observe")
    if isinstance(found, Once):
        return found.observers
    if not callable(found):
        kind = type(found).__name__
        raise ConfigurationError(f"--observe {place} is a {kind}, not a Once or an observer")
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
        raise ConfigurationError(f"{option}: the module {name} does not exist here or among the installed ones")
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigurationError(f"{option}: {name} cannot be imported: {error}") from error
    except Exception as error:
        if type(error).__module__.startswith("django."):  # its settings or its apps are not loaded
            raise ConfigurationError(
                f"{option}: {name} is part of a Django project: use `python manage.py oncekey`, without {option}"
            ) from error
        raise
