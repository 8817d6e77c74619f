"""`manage.py check`: the mistakes of a project that would else be found by a client, each with what mends it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from django.conf import settings
from django.core.checks import Error, Warning  # noqa: A004  (Django's own name)
from django.db import connections

from oncekey.core.errors import ConfigurationError
from oncekey.core.model import Effects
from oncekey.django.once import NO_TENANT, Once
from oncekey.django.project import METHODS, alias_of_project, enrolment_of, once_of_project, views

if TYPE_CHECKING:
    from collections.abc import Iterator

    from oncekey.django.database import Database

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


def checks(**_: Any) -> list[Any]:  # noqa: ANN401  (Django's signature)
    """What is wrong with the project."""
    try:
        once = once_of_project()
    except ConfigurationError as error:
        return [Error(str(error), id="oncekey.E001")]
    database = once.threads.database
    stored = _unshared(once) if database is None else _database(once, database)
    return [*_placing(), *_tenant(once), *stored]


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
