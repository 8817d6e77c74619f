"""What a project has of the app: checks, migrations, the command, pages for administrators, listings, OpenAPI."""

from __future__ import annotations

import importlib
import io
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from django.core.management import CommandError, call_command
from django.db import connections
from django.test import Client, override_settings
from django.urls import path
from openapi_spec_validator import validate

from django_shop.asking import new_key, post, sold
from harness.patience import PATIENCE
from oncekey import LOCAL, OUTBOX, PHASED, SINGLE_TENANT, ConfigurationError, Effects, SyncOperation, resumed_as
from oncekey.databases.postgres import store as postgres_store
from oncekey.databases.sqlite import store as sqlite_store

TESTS = Path(__file__).parents[1]


def messages(**changed: Any) -> list[str]:
    from oncekey.django.checks import checks

    with override_settings(**changed):
        return [f"{one.id}: {one.msg}" for one in checks()]


def test_a_valid_project_has_no_check_messages(alias: str) -> None:
    assert messages() == []


def test_a_misplaced_middleware_fails_the_check(postgres: str) -> None:
    ours = "oncekey.django.Middleware"
    other = "django.middleware.common.CommonMiddleware"
    for placed in ([ours, other], [other], [ours, ours]):
        (said,) = messages(MIDDLEWARE=placed)
        assert said.startswith("oncekey.E002: 'oncekey.django.Middleware' must be in MIDDLEWARE exactly once")


def test_an_invalid_oncekey_setting_fails_the_check(postgres: str) -> None:
    assert messages(ONCEKEY=None)[0].startswith("oncekey.E001: settings.ONCEKEY is missing")
    assert "does not define" in messages(ONCEKEY="django_shop.site.nothing")[0]
    assert "not an oncekey.django.Once" in messages(ONCEKEY="django_shop.site.site")[0]


def test_an_unknown_database_alias_is_rejected(project: None) -> None:
    from oncekey.django import Database, Once

    with pytest.raises(
        ConfigurationError, match=r"Database\('other'\) is not in settings.DATABASES, which has 'default', "
    ):
        Once(Database("other"), tenant=SINGLE_TENANT)


def check_of(monkeypatch: pytest.MonkeyPatch, once: Any) -> list[str]:
    from django_shop import on_default

    monkeypatch.setattr(on_default, "once", once)
    return messages()


def test_missing_tenant_and_separate_store_fail_the_check(postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from oncekey.django import Once

    once = Once("sqlite:///beside.db")

    @once.protect(effects=LOCAL, operation="beside")
    def view(request):
        return None

    once.protect(effects=PHASED, operation="stepping")(lambda request: None)
    tenant, beside, stepping = check_of(monkeypatch, once)
    assert tenant.startswith("oncekey.E003: Once(tenant=...) is missing")
    assert beside.startswith("oncekey.E004: beside has effects=LOCAL, but keys are stored over another connection")
    assert stepping.startswith("oncekey.W003: stepping has effects=PHASED, but keys are stored over another connection")


def test_phased_views_with_atomic_requests_fail_the_check(postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)
    (said,) = messages()
    assert said.startswith("oncekey.E006: wrapped has effects=PHASED and commits by itself, but ATOMIC_REQUESTS")
    assert 'name="dispatch"' in said


def test_check_names_the_views_that_fail_in_atomic_requests(alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from rest_framework.decorators import api_view
    from rest_framework.response import Response

    from django_shop import on_default, on_lite

    once = (on_default if alias == "default" else on_lite).once
    monkeypatch.setattr(once, "enrolled", dict(once.enrolled))
    monkeypatch.setitem(connections.settings[alias], "ATOMIC_REQUESTS", True)

    def wrapped(effects: Effects) -> Any:
        @api_view(["POST"])
        @once.protect(effects=effects, operation=f"wrapped as {effects.name}")
        def view(request: Any, op: SyncOperation) -> Any:
            if effects is OUTBOX:
                op.defer("ship", {"item": "tea"})
            return Response({}, 202 if effects is OUTBOX else 201)

        return view

    with override_settings(ROOT_URLCONF=tuple(path(effects.name, wrapped(effects)) for effects in Effects)):
        listed = {said.split("effects=")[1].split()[0] for said in messages() if said.startswith("oncekey.E006")}
        failed = {effects.name for effects in Effects if post(f"/{effects.name}").status_code == 500}
    assert listed == failed == ({"PHASED", "INLINE"} if alias == "default" else {one.name for one in Effects})


def test_sqlite_class_views_with_atomic_requests_fail_the_check(lite: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(connections.settings["lite"], "ATOMIC_REQUESTS", True)
    said = messages()
    assert len(said) > 3
    assert any("site.<locals>.Things.post has effects=LOCAL" in one for one in said)
    assert not any(one.startswith("oncekey.E006: orders ") for one in said)


def test_sqlite_without_immediate_transactions_warns(lite: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Pitfall 15
    monkeypatch.setitem(connections.settings["lite"], "OPTIONS", {})
    (said,) = messages()
    assert said.startswith("oncekey.W001: the SQLite database 'lite' begins transactions without a lock")


def test_a_wrong_oncekey_database_setting_is_reported(lite: str) -> None:
    (said,) = messages(ONCEKEY_DATABASE="default")
    assert said.endswith("set ONCEKEY_DATABASE = 'lite'")


def test_the_check_warns_about_psycopg2(postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections["default"], "Database", type("Module", (), {"__name__": "psycopg2"})())
    (said,) = messages()
    assert said.startswith("oncekey.W002: the database 'default' uses psycopg2")


def test_disabled_autocommit_fails_the_check(postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(connections.settings["default"], "AUTOCOMMIT", False)
    assert any(one.startswith("oncekey.E005") for one in messages())


# Migrations


def test_django_migrations_create_all_tables(project: None) -> None:
    # A released migration of Django's is not edited: the last one that makes tables counts, whichever file that is.
    from oncekey.django import migrations
    from oncekey.django.models import MakeTables

    names = sorted(found.name for found in pkgutil.iter_modules(migrations.__path__))
    files = [importlib.import_module(f"{migrations.__name__}.{name}").Migration for name in names]
    made = [one for file in files for one in file.operations if isinstance(one, MakeTables)]
    upto = made[-1].deconstruct()[1][0]
    assert upto == {
        "postgresql": len(postgres_store.tables().migrations),
        "sqlite": len(sqlite_store.tables().migrations),
    }


def test_makemigrations_detects_no_changes(postgres: str) -> None:
    out = io.StringIO()
    call_command("makemigrations", "oncekey", check=True, dry_run=True, stdout=out)
    assert "No changes detected" in out.getvalue()
    call_command("migrate", "oncekey", database="default", verbosity=0)


def test_django_migrations_keep_existing_tables(postgres: str) -> None:
    # who ran `oncekey migrate up` before
    key = new_key()
    post("/orders", key=key)
    call_command("migrate", "oncekey", "zero", database="default", verbosity=0)
    call_command("migrate", "oncekey", database="default", verbosity=0)
    assert post("/orders", key=key).headers["Idempotent-Replayed"] == "true"


# The command


def environment(tmp_path: Path, database: str | None = None, **more: str) -> dict[str, str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SHOP_")}
    environ |= {"PYTHONPATH": os.pathsep.join([str(TESTS), environ.get("PYTHONPATH", "")])}
    environ |= {
        "SHOP_DATABASE": database or str(tmp_path / "shop.db"),
        "DJANGO_SETTINGS_MODULE": "django_shop.settings",
    }
    return environ | more


def manage(tmp_path: Path, *args: str, database: str | None = None, **more: str) -> subprocess.CompletedProcess[str]:
    command, environ = [sys.executable, "-m", "django", *args], environment(tmp_path, database, **more)
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=120)


def test_the_management_command_uses_the_projects_database(tmp_path: Path, postgres_dsn: str) -> None:
    # on SQLite tests/docs runs these commands, as the guide has them
    database = postgres_dsn
    assert manage(tmp_path, "migrate", "--run-syncdb", database=database).returncode == 0
    status = manage(tmp_path, "oncekey", "migrate", "status", database=database)
    assert (status.returncode, status.stdout.count("applied")) == (0, 13), status.stderr
    worked = manage(tmp_path, "oncekey", "worker", "--once", database=database)
    assert worked.returncode == 0, worked.stderr
    assert "Django's database 'default'" in worked.stdout
    listed = manage(tmp_path, "oncekey", "keys", "list", "--json", database=database)
    assert json.loads(listed.stdout)["items"] == []
    doctor = manage(tmp_path, "oncekey", "doctor", database=database)
    assert "-> run `manage.py oncekey worker`, or pass workers=True" in doctor.stdout
    assert manage(tmp_path, "check", database=database).returncode == 0
    assert "CREATE TABLE" in manage(tmp_path, "oncekey", "migrate", "sql", database=database).stdout
    # neither a variable of another store nor Django's own options change that
    options = (
        "--settings=django_shop.settings",
        "oncekey",
        "--no-color",
        "-v",
        "2",
        "--log",
        "keys",
        "list",
        "--pythonpath",
        str(tmp_path),
        "--verbosity=2",
    )
    elsewhere = {"ONCEKEY_STORE": f"sqlite:///{tmp_path}/elsewhere.db", "DJANGO_SETTINGS_MODULE": "nowhere"}
    listed = manage(tmp_path, *options[1:], options[0], database=database, **elsewhere)
    assert (listed.returncode, listed.stdout) == (0, "no matching keys\n"), listed.stderr
    help_text = manage(tmp_path, "oncekey", "worker", "--help", database=database).stdout
    assert ("Usage: manage.py oncekey worker" in help_text, "[required]" in help_text) == (True, False)
    assert "[default: (the project's)]" in " ".join(help_text.split())


def test_the_management_command_can_be_called(lite: str) -> None:
    out = io.StringIO()
    assert post("/shipments", key=new_key()).status_code == 202
    call_command("oncekey", "worker", "--once", stdout=out)
    assert out.getvalue().splitlines()[-1] == "1 done"
    call_command("oncekey", "-v", "2", "worker", "--once", stdout=out)
    assert out.getvalue().splitlines()[-1] == "0 done"
    with pytest.raises(CommandError, match="no task 'nothing'; the tasks are"):
        call_command("oncekey", "worker", "--only", "nothing", stdout=out)
    with pytest.raises(CommandError, match=r"manage\.py oncekey doctor --quiet failed") as failed:
        call_command("oncekey", "doctor", "--quiet", stdout=out)
    assert (failed.value.returncode, "-> run `manage.py oncekey worker`, or" in out.getvalue()) == (1, True), (
        out.getvalue()
    )


def test_the_console_of_a_project_names_its_commands(tmp_path: Path) -> None:
    assert manage(tmp_path, "migrate", "--run-syncdb").returncode == 0
    command = [sys.executable, "-m", "django", "oncekey", "console", "--as", "ann", "--port", "0"]
    with subprocess.Popen(command, env=environment(tmp_path), stdout=subprocess.PIPE, text=True) as served:
        try:
            assert served.stdout is not None
            address, token = served.stdout.readline().split()[-1].split("/login#")
            with httpx.Client(base_url=address, follow_redirects=True, timeout=PATIENCE) as client:
                page = client.post("/login", data={"token": token}).text
        finally:
            served.kill()
    assert "Start one: <code>manage.py oncekey worker</code>" in page


def test_the_management_command_reports_errors_without_traceback(tmp_path: Path) -> None:
    assert "no such" in manage(tmp_path, "oncekey", "nonsense").stderr.lower()
    missing = manage(tmp_path, "oncekey", "keys", "list")
    assert missing.returncode != 0
    assert "Traceback" not in missing.stderr


def test_the_plain_command_names_the_management_command(tmp_path: Path) -> None:
    command = [
        str(Path(sys.executable).with_name("oncekey")),
        "worker",
        "--app",
        "django_shop.on_default:once",
        "--once",
    ]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=False, timeout=60)
    wanted = "is part of a Django project: use `python manage.py oncekey`, without --app"
    assert (done.returncode, wanted in done.stderr.splitlines()[-1]) == (2, True), done.stderr


def test_an_alias_of_databases_is_refused_as_a_store() -> None:
    from oncekey.django import Once

    with pytest.raises(ConfigurationError, match=r"write Once\(Database\('default'\)\)"):
        Once("default")


def test_once_is_created_before_the_settings_are_read() -> None:
    program = "from oncekey.django import Once; Once('memory:', tenant=lambda request: 'acme')"
    environ = {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_missing_django_migrations_log_the_command_to_run(
    lite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from oncekey.django import Database, Once

    name = "unmigrated"
    monkeypatch.setitem(connections.settings, name, connections.settings[lite] | {"NAME": str(tmp_path / "empty.db")})
    once = Once(Database(name), tenant=SINGLE_TENANT)
    try:
        assert not once.threads.ready()
    finally:
        connections[name].close()
        del connections[name]
    assert "the store could not be checked: the store has no oncekey tables" in caplog.text
    assert "`manage.py migrate`" in caplog.text


def test_a_missing_middleware_class_is_left_to_django(postgres: str) -> None:
    assert messages(MIDDLEWARE=["nowhere.Middleware", "oncekey.django.Middleware"]) == []


class ResumesUsers:
    """A middleware that logs in whom a worker resumes."""

    def __call__(self, request: Any) -> Any:
        return resumed_as(request)


def test_a_middleware_that_resumes_users_has_its_place(postgres: str) -> None:
    ours, there = "oncekey.django.Middleware", "django.contrib.auth.middleware."
    login, required = f"{there}AuthenticationMiddleware", f"{there}LoginRequiredMiddleware"
    resumes = f"{__name__}.ResumesUsers"
    for order, why in (
        ([resumes, login, required], f"{login} comes after it and replaces the user"),
        ([login, required, resumes], f"{required} comes before it and sees no user"),
    ):
        (said,) = [one for one in messages(MIDDLEWARE=[*order, ours]) if "W007" in one]
        assert said.startswith(f"oncekey.W007: {resumes} calls oncekey.resumed_as(request), but {why}")
    assert not any("W007" in one for one in messages(MIDDLEWARE=[login, resumes, required, ours]))


def test_an_alias_is_not_a_store(postgres: str) -> None:
    from oncekey.django import Once

    with pytest.raises(ConfigurationError, match=r"write Once\(Database\('default'\)\)"):
        Once("default", tenant=SINGLE_TENANT)


def test_mysql_is_refused_before_it_is_connected_to(tmp_path: Path) -> None:
    # Django takes PyMySQL for its own driver; no server listens at that address
    refused = manage(tmp_path, "check", database="mysql:")
    assert refused.returncode == 1
    assert "is MySQL or MariaDB; Django databases that store keys must be PostgreSQL" in refused.stderr.splitlines()[-1]


# Listings


def lines() -> dict[str, str]:
    from django_shop import on_default
    from oncekey.once.route_report import route_lines

    return {line.named: str(line.verdict) for line in route_lines([on_default.once], on_default.once.served)}


def test_every_route_is_listed_with_its_protection(postgres: str) -> None:
    found = lines()
    assert found["POST /orders"] == found["POST /things"] == found["POST /rest/by-function"] == "protected"
    assert found["POST /rest/orders/"] == found["POST /rest/orders/{pk}/pay/"] == "protected"
    assert found["DELETE /rest/orders/{pk}/"] == "protected"
    # what a view set inherits is what nobody sees
    assert found["PUT /rest/orders/{pk}/"] == "idempotent"
    assert found["PATCH /rest/orders/{pk}/"] == "open"
    assert found["POST /legacy/{number}"] == "open"
    assert found["POST /private"] == "protected"
    assert "GET /things" not in found
    assert not any("format" in name or "admin" in name or "idempotency-keys" in name for name in found)


def test_the_audit_command_covers_django_routes(tmp_path: Path) -> None:
    said = manage(tmp_path, "oncekey", "routes", "--json")
    assert said.returncode == 1, said.stderr
    items = {f"{one['method']} {one['path']}": one for one in json.loads(said.stdout)["items"]}
    assert items["POST /payments"]["effects"] == "phased"
    assert manage(tmp_path, "oncekey", "audit").returncode == 1


def test_drf_spectacular_openapi_documents_the_key(postgres: str) -> None:
    document = json.loads(Client().get("/schema", headers={"Accept": "application/vnd.oai.openapi+json"}).content)
    validate(document)
    pay = document["paths"]["/rest/orders/{id}/pay/"]["post"]
    assert pay["x-oncekey"] == {"effects": "local", "operation": "site.<locals>.Orders.pay"}
    assert any(one["name"] == "Idempotency-Key" for one in pay["parameters"])
    assert "409" in pay["responses"]
    assert "x-oncekey" not in document["paths"]["/rest/orders/"]["get"]
    assert "x-oncekey" not in document["paths"]["/rest/orders/{id}/"]["patch"]


# Administrators


def test_the_django_admin_pages_are_read_only(postgres: str) -> None:
    from django.contrib.auth.models import User

    from oncekey.django.models import Record

    key = new_key()
    post("/orders", key=key)
    post("/inline", {"does": "raise"})
    User.objects.all().delete()
    client = Client()
    client.force_login(User.objects.create_superuser("root"))
    page = client.get("/admin/oncekey/record/")
    assert (page.status_code, key in page.content.decode(), b"ann" in page.content) == (200, True, True)
    assert key in client.get(f"/admin/oncekey/record/?q={key[:8]}").content.decode()
    assert key not in client.get("/admin/oncekey/record/?state=unknown").content.decode()
    assert client.get("/admin/oncekey/record/add/").status_code == 403
    number = Record.objects.using("default").get(key=key).pk
    shown = client.get(f"/admin/oncekey/record/{number}/change/")
    assert (shown.status_code, b"_save" in shown.content, b"completed" in shown.content) == (200, False, True)
    assert client.post(f"/admin/oncekey/record/{number}/delete/", {"post": "yes"}).status_code == 403
    with pytest.raises(TypeError, match="written by oncekey only"):
        Record.objects.using("default").get(key=key).save()
    assert sold() == ["inline", "tea"]


def test_phased_views_are_excluded_from_atomic_requests(postgres: str) -> None:
    from django_shop import on_default

    enrolled = on_default.once.enrolled
    assert enrolled["payments"]._non_atomic_requests == {"default"}
    assert not hasattr(enrolled["orders"], "_non_atomic_requests")
