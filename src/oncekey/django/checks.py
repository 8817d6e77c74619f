"""System checks for `manage.py check`: mistakes in a project that would fail at run time, with their fixes."""

from __future__ import annotations

import inspect
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from django.conf import settings
from django.core.checks import Error, Warning  # noqa: A004  (Django's own name)
from django.db import connections
from django.urls import Resolver404, resolve
from django.utils.module_loading import import_string

from oncekey.core.errors import ConfigurationError
from oncekey.core.model import Effects
from oncekey.django.database import VENDORS
from oncekey.django.once import NO_TENANT, Once
from oncekey.django.project import METHODS, alias_of_project, class_of, enrolment_of, has_login, once_of_project, views
from oncekey.frameworks.resuming import resumed_as

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from oncekey.django.database import Database
    from oncekey.engine.enrolment import Enrolment

MIDDLEWARE: Final = frozenset({"oncekey.django.Middleware", "oncekey.django.middleware.Middleware"})
LAST: Final = (
    "'oncekey.django.Middleware' must be in MIDDLEWARE exactly once, as its last entry: without it no view is "
    "protected, and what a middleware after it adds to a response is missing from the replay"
)
NOT_IMMEDIATE: Final = (
    "the SQLite database {alias!r} begins transactions without a lock, so two views that read before they write fail "
    "with \"database is locked\": set OPTIONS = {{'transaction_mode': 'IMMEDIATE'}}"
)
WRAPPED: Final = (
    "{operation} {why}, but ATOMIC_REQUESTS of {alias!r} wraps it in a transaction: put "
    "@transaction.non_atomic_requests above the view; on a class, @method_decorator(transaction.non_atomic_requests, "
    'name="dispatch")'
)
NOT_SHARED: Final = (
    "{operation} has effects={effects}, but keys are stored over another connection than the one your models use, so "
    "rows and key would not commit together: {remedy}"
)
NOT_SHARED_PHASES: Final = (
    "{operation} has effects={effects}, but keys are stored over another connection than the one your models use, so "
    "rows that its phases write through models are not in their transactions: write with the connection that op.phase "
    "passes, or {remedy}"
)
NOT_SHARED_BY_MYSQL: Final = "move the models to PostgreSQL or SQLite, the databases of Django that can store keys"
OTHER_DATABASE: Final = (
    "Once stores its keys in Database({alias!r}), but the admin pages read another database: set ONCEKEY_DATABASE = "
    "{alias!r}"
)
OLD_DRIVER: Final = (
    "the database {alias!r} uses psycopg2, with which oncekey is not tested: install psycopg 3 (pip install "
    "'psycopg[binary]'); Django then uses it automatically"
)
NO_AUTOCOMMIT: Final = (
    "the database {alias!r} has AUTOCOMMIT = False, so oncekey cannot commit a claim by itself: remove that setting"
)
NOT_RESUMED: Final = (
    "{operation} has effects=PHASED, and a worker that resumes it has no credentials: none of its authentication code "
    "calls oncekey.resumed_as(request), so the worker would be refused; add {where} that logs in the user of "
    "resumed_as(request), or set complete=False"
)
MISPLACED: Final = (
    "{middleware} calls oncekey.resumed_as(request), but {other} comes {order} it and {does}, so workers are refused: "
    "in MIDDLEWARE, put {middleware} between {login} and any LoginRequiredMiddleware"
)
OTHER_LOGIN: Final = (
    "once.status_view is routed directly, but REST framework authenticates the callers of {operation} in its own "
    "views, so every key would return 404: call once.status_view from a view of REST framework with the same "
    "authentication"
)
NO_STATUS: Final = (
    "status={status!r}, but no URL is routed there, so the Location of refusals returns 404: route "
    "{status}/<path:key> to once.status_view"
)
_MIXINS: Final = "django.contrib.auth.mixins"
_AUTHENTICATION: Final = "django.contrib.auth.middleware.AuthenticationMiddleware"
_LOGIN_MIDDLEWARE: Final = "django.contrib.auth.middleware.LoginRequiredMiddleware"
_ELSEWHERE: Final = frozenset({"SessionAuthentication", "RemoteUserAuthentication"})
"""Authentication classes of REST framework that rely on Django's middleware."""
_FRAMEWORKS: Final = ("django.", "rest_framework.", "oncekey.")
_DEEPEST: Final = 5


def checks(**_: Any) -> list[Any]:  # noqa: ANN401  (Django's signature)
    """Return the errors and warnings of the project."""
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

    for place, name in enumerate(settings.MIDDLEWARE):
        above, below = settings.MIDDLEWARE[:place], settings.MIDDLEWARE[place + 1 :]
        faults = (
            (_AUTHENTICATION, below, "after", "replaces the user"),
            (_LOGIN_MIDDLEWARE, above, "before", "sees no user"),
        )
        for other, there, order, does in faults:
            if other in there and _calls_resumed_as(_imported([name])):
                facts = {"middleware": name, "other": other, "order": order, "does": does, "login": _AUTHENTICATION}
                yield Warning(MISPLACED.format(**facts), id="oncekey.W007")


def _tenant(once: Once) -> Iterator[Any]:
    if not once.has_tenant:
        yield Error(NO_TENANT, id="oncekey.E003")


def _unshared(once: Once) -> Iterator[Any]:
    remedy = 'use Once(Database("default"))' if connections["default"].vendor in VENDORS else NOT_SHARED_BY_MYSQL
    for view in once.enrolled.values():
        enrolment = view.__oncekey__  # type: ignore[attr-defined]  # every enrolled view has one
        names = {"operation": enrolment.operation, "effects": enrolment.effects.name, "remedy": remedy}
        if enrolment.transactional:
            yield Error(NOT_SHARED.format(**names), id="oncekey.E004")
        elif enrolment.effects is Effects.PHASED:
            yield Warning(NOT_SHARED_PHASES.format(**names), id="oncekey.W003")


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
            why = f"has effects={enrolment.effects.name} and commits by itself"
            if enrolment.transactional and database.one_commit:
                if enrolment.blocking:
                    continue
                why = "is `async def`, which Django does not call in a transaction"
            reported.add(enrolment.operation)
            facts = {"operation": enrolment.operation, "why": why, "alias": database.alias}
            yield Error(WRAPPED.format(**facts), id="oncekey.E006")


def _logins(once: Once) -> Iterator[Any]:
    """Views that a worker cannot authenticate to, and a status view that does not authenticate its callers."""
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
            where = _lacking(view) if enrolment.completes and enrolment.operation not in reported else None
            if where is not None:
                reported.add(enrolment.operation)
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


def _lacking(view: Any) -> str | None:  # noqa: ANN401  (a view of any kind)
    """What has to call `resumed_as` so that a worker may call the view; None if nothing is missing."""
    of_class, authenticators = class_of(view), _authenticators(view)
    middleware = list(_imported(settings.MIDDLEWARE))
    closed = has_login(view) or any(base.__module__ == _MIXINS for base in getattr(of_class, "__mro__", ()))
    closed = closed or (_LOGIN_MIDDLEWARE in settings.MIDDLEWARE and getattr(view, "login_required", True))
    if closed and not _calls_resumed_as(middleware):
        return "a middleware"
    if authenticators is None:
        return None
    permissions = getattr(view, "initkwargs", {}).get("permission_classes", of_class.permission_classes)
    if all(getattr(one, "__name__", "") == "AllowAny" for one in permissions):
        return None
    shared = middleware if any(map(_takes_djangos_user, authenticators)) else []
    return None if _calls_resumed_as([*authenticators, *permissions, *shared]) else "an authentication class"


def _takes_djangos_user(authenticator: Any) -> bool:  # noqa: ANN401
    """Whether an authentication class of REST framework reads Django's request, whose user a middleware sets."""
    methods = (vars(base).get("authenticate") for base in authenticator.__mro__)
    return any("_request" in _names(method.__code__) for method in methods if inspect.isfunction(method))


def _imported(names: Iterable[str]) -> Iterator[Any]:
    """The middleware with these names; Django reports a name that does not exist."""
    for name in names:
        with suppress(ImportError):
            yield import_string(name)


def _authenticators(view: Any) -> list[Any] | None:  # noqa: ANN401
    """The authentication classes of a view of REST framework; None for any other view."""
    of_class = class_of(view)
    if not hasattr(of_class, "authentication_classes"):
        return None
    return list(getattr(view, "initkwargs", {}).get("authentication_classes", of_class.authentication_classes))


def _calls_resumed_as(found: Iterable[Any], depth: int = 0) -> bool:
    """Whether the code of one of these classes and functions calls `resumed_as`, directly or through another one."""
    for one in found:
        if one is resumed_as:
            return True
        if depth > _DEEPEST or str(getattr(one, "__module__", "")).startswith(_FRAMEWORKS):
            continue
        if inspect.isclass(one):
            if _calls_resumed_as([*vars(one).values(), *one.__bases__], depth + 1):
                return True
        elif inspect.isfunction(one):
            names = set(_names(one.__code__))
            if "resumed_as" in names or _calls_resumed_as([one.__globals__.get(name) for name in names], depth + 1):
                return True
    return False


def _names(code: Any) -> Iterator[str]:  # noqa: ANN401  (a code object)
    yield from code.co_names
    for inner in code.co_consts:
        if inspect.iscode(inner):
            yield from _names(inner)
