"""`manage.py check`: the mistakes of a project that would else be found by a client, each with what mends it."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Final

from django.conf import settings
from django.core.checks import Error, Warning  # noqa: A004  (Django's own name)
from django.db import connections
from django.urls import Resolver404, resolve
from django.utils.module_loading import import_string

from oncekey.core.errors import ConfigurationError
from oncekey.core.model import Effects
from oncekey.django.once import NO_TENANT, Once
from oncekey.django.project import METHODS, alias_of_project, class_of, enrolment_of, has_login, once_of_project, views
from oncekey.frameworks.resuming import resumed_as

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from oncekey.django.database import Database
    from oncekey.engine.enrolment import Enrolment

MIDDLEWARE: Final = frozenset({"oncekey.django.Middleware", "oncekey.django.middleware.Middleware"})
LAST: Final = (
    "'oncekey.django.Middleware' has to be in MIDDLEWARE once and last: what a middleware behind it changes would be "
    "stored"
)
NOT_IMMEDIATE: Final = (
    "the SQLite database {alias!r} begins transactions without a lock, so two views that read before they write fail "
    "with \"database is locked\": say OPTIONS = {{'transaction_mode': 'IMMEDIATE'}}"
)
WRAPPED: Final = (
    "{operation} is effects={effects} and commits by itself, but ATOMIC_REQUESTS of {alias!r} puts a transaction "
    "around it: put @transaction.non_atomic_requests above the view; on a class, @method_decorator("
    'transaction.non_atomic_requests, name="dispatch")'
)
BESIDE: Final = (
    "{operation} is effects={effects}, and the keys are kept at a URL of their own, on another connection than the one "
    "your models use: rows and key would not commit together; say Once(Database({alias!r}))"
)
BESIDE_PHASES: Final = (
    "{operation} is effects={effects}, and the keys are kept at a URL of their own: what its phases write through "
    "models is not in their transactions; write by the connection that op.phase hands on, or say "
    "Once(Database({alias!r}))"
)
OTHER_DATABASE: Final = (
    "Once keeps its keys in Database({alias!r}), and the pages for administrators look elsewhere: say "
    "ONCEKEY_DATABASE = {alias!r}"
)
OLD_DRIVER: Final = (
    "the database {alias!r} is reached by psycopg2, which oncekey's own tests do not run with: install psycopg 3 (pip "
    "install 'psycopg[binary]'), which Django then uses by itself"
)
NO_AUTOCOMMIT: Final = (
    "the database {alias!r} has AUTOCOMMIT = False, so no claim can be committed by itself: leave it out"
)
NOT_RESUMED: Final = (
    "{operation} is effects=PHASED, and a worker that resumes it has no credentials: nothing that authenticates its "
    "callers calls oncekey.resumed_as(request), so the worker is refused; add {where} that logs in the user whom "
    "resumed_as(request) names, or say complete=False"
)
OTHER_LOGIN: Final = (
    "once.status_view is routed directly, and REST framework authenticates the callers of {operation} in its own "
    "views: call once.status_view from a view of REST framework with the same authentication, or every key is 404"
)
NO_STATUS: Final = (
    "status={status!r} and no URL leads there, so the Location of refusals is 404: route "
    "{status}/<path:key> to once.status_view"
)
_MIXINS: Final = "django.contrib.auth.mixins"
_LOGIN_MIDDLEWARE: Final = "django.contrib.auth.middleware.LoginRequiredMiddleware"
_ELSEWHERE: Final = frozenset({"SessionAuthentication", "RemoteUserAuthentication"})
"""What REST framework takes over from Django's own middleware."""
_FRAMEWORKS: Final = ("django.", "rest_framework.", "oncekey.")
_DEEPEST: Final = 5


def checks(**_: Any) -> list[Any]:  # noqa: ANN401  (Django's signature)
    """What is wrong with the project."""
    try:
        once = once_of_project()
    except ConfigurationError as error:
        return [Error(str(error), id="oncekey.E001")]
    database = once.threads.database
    stored = _unshared(once) if database is None else _database(once, database)
    return [*_placing(), *_tenant(once), *stored, *_logins(once)]


def _placing() -> Iterator[Any]:
    ours = [name in MIDDLEWARE for name in settings.MIDDLEWARE]
    if ours.count(True) != 1 or not ours[-1]:
        yield Error(LAST, id="oncekey.E002")


def _tenant(once: Once) -> Iterator[Any]:
    if not once.has_tenant:
        yield Error(NO_TENANT, id="oncekey.E003")


def _unshared(once: Once) -> Iterator[Any]:
    for view in once.enrolled.values():
        enrolment = view.__oncekey__  # type: ignore[attr-defined]  # every enrolled view has one
        names = {"operation": enrolment.operation, "effects": enrolment.effects.name, "alias": "default"}
        if enrolment.transactional:
            yield Error(BESIDE.format(**names), id="oncekey.E004", obj=view)
        elif enrolment.effects is Effects.PHASED:
            yield Warning(BESIDE_PHASES.format(**names), id="oncekey.W003", obj=view)


def _database(once: Once, database: Database) -> Iterator[Any]:
    facts = connections.settings[database.alias]
    if database.alias != alias_of_project():
        yield Error(OTHER_DATABASE.format(alias=database.alias), id="oncekey.E007")
    if not facts["AUTOCOMMIT"]:
        yield Error(NO_AUTOCOMMIT.format(alias=database.alias), id="oncekey.E005")
    if database.dialect == "sqlite" and str(facts["OPTIONS"].get("transaction_mode", "")).upper() != "IMMEDIATE":
        yield Warning(NOT_IMMEDIATE.format(alias=database.alias), id="oncekey.W001")
    if connections[database.alias].Database.__name__ == "psycopg2":
        yield Warning(OLD_DRIVER.format(alias=database.alias), id="oncekey.W002")
    if facts["ATOMIC_REQUESTS"]:
        yield from _wrapped(once, database)


def _wrapped(once: Once, database: Database) -> Iterator[Any]:
    reported = set()
    for view in views():
        if not database.wraps(view):
            continue
        for method in METHODS:
            enrolment = enrolment_of(view, method)
            if enrolment is None or enrolment.owner is not once or enrolment.operation in reported:
                continue
            if enrolment.transactional and database.one_commit:
                continue
            reported.add(enrolment.operation)
            facts = {"operation": enrolment.operation, "effects": enrolment.effects.name, "alias": database.alias}
            yield Error(WRAPPED.format(**facts), id="oncekey.E006")


def _logins(once: Once) -> Iterator[Any]:
    """Views that a worker cannot enter, and a status view that does not find out who asks."""
    direct = False
    apart: Enrolment | None = None
    reported = set()
    for view in views():
        direct = direct or view == once.status_view
        for method in METHODS:
            enrolment = enrolment_of(view, method)
            if enrolment is None or enrolment.owner is not once:
                continue
            authenticators = _authenticators(view)
            if authenticators and not any(_is_elsewhere(one) for one in authenticators):
                apart = apart or enrolment
            if enrolment.completes and enrolment.operation not in reported and not _admits_workers(view):
                reported.add(enrolment.operation)
                where = "a middleware" if authenticators is None else "an authentication class"
                yield Warning(NOT_RESUMED.format(operation=enrolment.operation, where=where), id="oncekey.W004")
    if direct and apart is not None and once.reads_user:
        yield Warning(OTHER_LOGIN.format(operation=apart.operation), id="oncekey.W005")
    status = once.threads.status_path
    if status is not None:
        try:
            resolve(f"{status}/a-key")
        except Resolver404:
            yield Warning(NO_STATUS.format(status=status), id="oncekey.W006")


def _is_elsewhere(authenticator: Any) -> bool:  # noqa: ANN401
    return any(base.__name__ in _ELSEWHERE for base in authenticator.__mro__)


def _admits_workers(view: Any) -> bool:  # noqa: ANN401  (a view of any kind)
    """Whether a request without credentials may reach the view, or something on its way asks for whom a worker acts."""
    of_class, authenticators = class_of(view), _authenticators(view)
    if authenticators is not None:
        permissions = getattr(view, "initkwargs", {}).get("permission_classes", of_class.permission_classes)
        closed = any(getattr(one, "__name__", "") != "AllowAny" for one in permissions)
    else:
        closed = has_login(view) or any(base.__module__ == _MIXINS for base in getattr(of_class, "__mro__", ()))
    closed = closed or _LOGIN_MIDDLEWARE in settings.MIDDLEWARE
    return not closed or _asks([*(authenticators or ()), *map(import_string, settings.MIDDLEWARE)])


def _authenticators(view: Any) -> list[Any] | None:  # noqa: ANN401
    """The authentication classes of a view of REST framework; None for any other view."""
    of_class = class_of(view)
    if not hasattr(of_class, "authentication_classes"):
        return None
    return list(getattr(view, "initkwargs", {}).get("authentication_classes", of_class.authentication_classes))


def _asks(found: Iterable[Any], depth: int = 0) -> bool:
    """Whether the code of one of these classes and functions calls `resumed_as`, by itself or through another one."""
    for one in found:
        if one is resumed_as:
            return True
        if depth > _DEEPEST or str(getattr(one, "__module__", "")).startswith(_FRAMEWORKS):
            continue
        if inspect.isclass(one):
            if _asks([*vars(one).values(), *one.__bases__], depth + 1):
                return True
        elif inspect.isfunction(one):
            names = set(_names(one.__code__))
            if "resumed_as" in names or _asks([one.__globals__.get(name) for name in names], depth + 1):
                return True
    return False


def _names(code: Any) -> Iterator[str]:  # noqa: ANN401  (a code object)
    yield from code.co_names
    for inner in code.co_consts:
        if inspect.iscode(inner):
            yield from _names(inner)
