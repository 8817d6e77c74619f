"""Django is configured once in a process, with both databases; each test chooses one of them, and finds it empty."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator

import pytest

from harness.databases import DatabaseServer


@pytest.fixture(scope="session")
def project(postgres_server: DatabaseServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The project with its tables in both databases."""
    dsn = postgres_server.create_database(f"django_{uuid.uuid4().hex}")
    os.environ["SHOP_DATABASE"] = dsn
    os.environ["SHOP_LITE"] = str(tmp_path_factory.mktemp("lite") / "shop.db")
    os.environ["DJANGO_SETTINGS_MODULE"] = "django_shop.settings"
    import django
    from django.core.management import call_command
    from django.db import connections
    from django.test import override_settings
    from django.test.utils import setup_test_environment

    django.setup()
    del os.environ["DJANGO_SETTINGS_MODULE"]  # Celery's processes of other tests would take it for theirs
    setup_test_environment()
    for alias in ("default", "lite"):
        with override_settings(**chosen(alias)):
            call_command("migrate", database=alias, run_syncdb=True, verbosity=0)
    yield
    from django_shop import on_default, on_lite

    for module in (on_default, on_lite):
        assert module.once.threads.stop(60)
        module.once.blocking().close()
    connections.close_all()
    del os.environ["SHOP_DATABASE"], os.environ["SHOP_LITE"]


def chosen(alias: str) -> dict[str, str]:
    site = f"django_shop.on_{alias}"
    return {"SHOP_ALIAS": alias, "ROOT_URLCONF": site, "ONCEKEY": f"{site}.once", "ONCEKEY_DATABASE": alias}


@pytest.fixture(params=["default", "lite"])
def alias(request: pytest.FixtureRequest, project: None) -> Iterator[str]:
    """On which database the site is."""
    yield from empty(request.param)


@pytest.fixture
def postgres(project: None) -> Iterator[str]:
    """The site on PostgreSQL."""
    yield from empty("default")


@pytest.fixture
def lite(project: None) -> Iterator[str]:
    """The site on SQLite."""
    yield from empty("lite")


def empty(alias: str) -> Iterator[str]:
    """The site on a database, with nothing in it."""
    from django.db import connections
    from django.test import override_settings

    from django_shop import site

    site.reset()
    tables = ["django_shop_line", "django_shop_order", "django_shop_payment"]
    prefix = "oncekey." if alias == "default" else "oncekey_"
    own = ["record", "outbox", "dead_letter"]
    with connections[alias].cursor() as cursor:
        for table in [*tables, *(prefix + name for name in own)]:
            cursor.execute(f"DELETE FROM {table}")
        if alias == "default":
            cursor.execute("DELETE FROM oncekey.work")
    with override_settings(**chosen(alias)):
        yield alias
    connections.close_all()
    connections.settings[alias]["ATOMIC_REQUESTS"] = False


@pytest.fixture(params=[False, True], ids=["plain", "atomic_requests"])
def atomic(request: pytest.FixtureRequest, postgres: str) -> Iterator[bool]:
    """Whether ATOMIC_REQUESTS puts a transaction around every view."""
    from django.db import connections

    connections.settings[postgres]["ATOMIC_REQUESTS"] = request.param
    yield request.param
    connections.settings[postgres]["ATOMIC_REQUESTS"] = False
