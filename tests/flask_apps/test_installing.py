"""Mistakes that are told at once, several applications, and what the commands see of one."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flask
import pytest
from flask.views import MethodView
from flask_sqlalchemy import SQLAlchemy

from flask_apps.conftest import with_tables
from flask_apps.shop import Shop
from flask_apps.test_views import items, sent
from oncekey import LOCAL, PHASED, SINGLE_TENANT, Once, SyncOperation
from oncekey.core.errors import ConfigurationError
from oncekey.flask import database

TESTS = Path(__file__).parents[1]


def login_required(view: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(view)
    def decorated_view(*args: Any, **kwargs: Any) -> Any:
        return view(*args, **kwargs)

    return decorated_view


def view() -> str:
    return "a secret"


@pytest.fixture
def once(tmp_path: Path) -> Once:
    return Once(f"sqlite:///{tmp_path}/keys.db", migrate=True)


def test_protection_above_login_required_is_rejected(once: Once) -> None:
    # a stranger with the key would get the answer
    with pytest.raises(ConfigurationError, match=r"login_required.*directly above the function"):
        once.protect(effects=LOCAL)(login_required(view))
    inner: Any = login_required(view)
    code, names = inner.__code__.replace(co_qualname="wrapper"), {"__name__": "flask_login.utils"}
    of_a_package = types.FunctionType(code, names, closure=inner.__closure__)
    of_a_package.__wrapped__ = view  # type: ignore[attr-defined]
    with pytest.raises(ConfigurationError, match="flask_login"):
        once.protect(effects=LOCAL)(of_a_package)
    login_required(once.protect(effects=LOCAL)(view))  # as it should be
    once.protect(effects=LOCAL, operation="tokens")(token_required)


def token_required() -> str:
    """A handler of that name is no decorator."""
    return ""


def test_protection_above_the_flask_route_is_rejected(once: Once) -> None:
    app = flask.Flask("shop")
    once.flask(app, tenant=SINGLE_TENANT)
    once.protect(effects=LOCAL)(app.post("/orders")(view))
    with pytest.raises(ConfigurationError, match=r"above @app\.route"):
        app.test_client().post("/orders")


@pytest.mark.parametrize("in_class", [False, True], ids=["function", "method"])
def test_an_async_view_with_phases_is_refused(once: Once, *, in_class: bool) -> None:
    app = flask.Flask("shop")

    class Orders(MethodView):
        @once.protect(effects=PHASED, operation="method")
        async def post(self) -> str:
            raise AssertionError("its steps could not be awaited")

    @once.protect(effects=PHASED)
    async def steps() -> str:
        raise AssertionError("its steps could not be awaited")

    app.add_url_rule("/orders", view_func=Orders.as_view("orders") if in_class else steps, methods=["POST"])
    once.flask(app, tenant=SINGLE_TENANT)
    with pytest.raises(ConfigurationError, match="make it a plain `def`"):
        app.test_client().post("/orders")


def test_once_flask_rejects_other_applications(once: Once) -> None:
    with pytest.raises(ConfigurationError, match=r"once\.wsgi"):
        once.flask(lambda environ, start: [], tenant=SINGLE_TENANT)
    app: Any = flask.Flask("shop")
    with pytest.raises(ConfigurationError, match=r"once\.flask\(app, tenant="):
        once.flask(app)  # type: ignore[call-arg]
    with pytest.raises(ConfigurationError, match="takes no tenants; the closest is tenant"):
        once.flask(app, tenants=SINGLE_TENANT)  # type: ignore[call-arg]


def test_a_database_needs_an_application() -> None:
    with pytest.raises(ConfigurationError, match="Flask-SQLAlchemy"):
        database(object())
    once = Once(database(SQLAlchemy()))
    with pytest.raises(ConfigurationError, match="connect it to an application"):
        once.blocking()


def test_each_flask_application_uses_its_own_database(tmp_path: Path) -> None:
    # One db and one Once for all, as application factories have them
    db = SQLAlchemy()
    once = Once(database(db), migrate=True)
    orders: Any = db.Table("sold", db.Column("item", db.String(50)))

    @once.protect(effects=LOCAL)
    def order() -> Any:
        db.session.execute(orders.insert().values(item=flask.request.get_json()["item"]))
        db.session.commit()
        if flask.request.headers.get("Fails"):
            raise ValueError("it stumbled")
        return {"all": db.session.execute(db.select(db.func.count()).select_from(orders)).scalar_one()}, 201

    def create_app(name: str) -> flask.Flask:
        app = flask.Flask(name)
        app.config["SQLALCHEMY_DATABASE_URI"] = f"sqlite:///{tmp_path}/{name}.db"
        db.init_app(app)
        once.flask(app, tenant=SINGLE_TENANT)
        app.add_url_rule("/orders", view_func=order, methods=["POST"])
        with app.app_context():
            db.create_all()
        return app

    apps = [create_app(name) for name in ("one", "two")]
    for app in apps:
        app.testing = True  # an error is settled when the application's context is gone, and in its own database
        headers = {"Idempotency-Key": "the-key-of-a-failure", "Fails": "yes"}
        with pytest.raises(ValueError, match="stumbled"):
            app.test_client().post("/orders", json={"item": "tea"}, headers=headers)
        for replayed in (None, "true"):
            said = app.test_client().post(
                "/orders", json={"item": "tea"}, headers={"Idempotency-Key": "the-key-of-both-of-them"}
            )
            assert (said.get_json(), said.headers.get("Idempotent-Replayed")) == ({"all": 1}, replayed)
        with app.app_context():
            db.engine.dispose()


def test_flask_works_with_a_store_url_without_sqlalchemy(once: Once, tmp_path: Path) -> None:
    app = flask.Flask("shop")
    ran: list[str] = []

    @app.post("/orders")
    @once.protect(effects=LOCAL)
    def order(op: SyncOperation) -> Any:
        op.connection.execute("CREATE TABLE IF NOT EXISTS sold (item)")
        op.connection.execute("INSERT INTO sold VALUES ('tea')")
        ran.append("order")
        return {"sold": len(op.connection.execute("SELECT * FROM sold").fetchall())}

    once.flask(app, tenant=lambda request: request.headers["Tenant"])
    for tenant, count in (("a", 1), ("a", 1), ("b", 2)):
        headers = {"Idempotency-Key": "the-key-of-all-of-them", "Tenant": tenant}
        said = app.test_client().post("/orders", headers=headers)
        assert said.get_json() == {"sold": count}
    assert ran == ["order"] * 2


def test_session_settings_of_a_flask_view_are_kept(open_shop: Callable[..., Shop], tables_dsn: str) -> None:
    # a SET that a handler of a lent connection would be refused: this one is the application's own
    shop = open_shop(with_tables(tables_dsn.replace("postgresql:", "postgresql+psycopg:")))

    @shop.app.post("/set")
    @shop.once.protect(effects=LOCAL, operation="set")
    def sets() -> Any:
        shop.db.session.execute(shop.db.text("SET application_name = 'shop'"))
        return {}

    assert shop.app.test_client().post("/set", headers=sent()).status_code == 200
    assert items(shop) == []


def ran(*arguments: str, url: str) -> Any:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", "from oncekey.cli import main; main()", *arguments]
    said = subprocess.run(command, env={**environment, "FLASK_SHOP": url}, capture_output=True, text=True, check=False)
    assert said.stdout, said.stderr
    return said.stdout


def test_the_audit_command_lists_flask_views(file_url: str) -> None:
    listed = ran("audit", "--app", "flask_apps.shop:app", url=file_url)
    for path in ("/orders", "/payments", "/stock/{name}"):
        assert path in listed


def test_the_openapi_command_adds_keys_to_flask_views(file_url: str, tmp_path: Path) -> None:
    bare: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "shop", "version": "1"},
        "paths": {"/orders": {"post": {"responses": {"201": {"description": "made"}}}}},
    }
    (tmp_path / "openapi.json").write_text(json.dumps(bare))
    said = ran("openapi", str(tmp_path / "openapi.json"), "--app", "flask_apps.shop:app", url=file_url)
    assert "Idempotency-Key" in said
