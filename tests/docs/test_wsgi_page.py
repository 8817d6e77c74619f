"""The programs of the guides to WSGI, to Flask and to blocking engines do what their pages say."""

from __future__ import annotations

import io
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from harness.pages import ROOT, Page, load
from harness.walkthrough import with_store

ANN = "a-long-token-of-ann"


def test_wsgi_guide_handlers_work_as_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with closing(sqlite3.connect("shop.db")) as connection:
        connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, product TEXT)")
    module: Any = load(Page(ROOT / "docs/howto/wsgi.md").program("plain.py"), "plain.py", tmp_path, monkeypatch)

    def post(path: str, key: str | None) -> tuple[str, dict[str, str], bytes]:
        body = json.dumps({"product": "tea"}).encode()
        environ: dict[str, Any] = {
            "REQUEST_METHOD": "POST",
            "PATH_INFO": path,
            "CONTENT_LENGTH": str(len(body)),
            "wsgi.input": io.BytesIO(body),
        }
        if key is not None:
            environ["HTTP_IDEMPOTENCY_KEY"] = key
        said: list[Any] = []
        answer = b"".join(module.application(environ, lambda *told: said.append(told)))
        return said[0][0], {name.lower(): value for name, value in said[0][1]}, answer

    for path, status, body in (("/orders", "201 Created", b'{"id": 1}'), ("/jobs", "202 Accepted", b"accepted")):
        first, again = [post(path, f"a-key-of-the-page{path}") for _ in "ab"]
        assert (first[0], first[2], again[0], again[2]) == (status, body, status, body)
        assert again[1]["idempotent-replayed"] == "true"
        assert post(path, None)[0] == "400 Bad Request"
    module.once.blocking().close()


@pytest.mark.parametrize("kept_in", ["sqlite", "postgresql"])
def test_flask_guide_shop_works_as_described(
    kept_in: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    url = f"sqlite:///{tmp_path}/shop.db"
    if kept_in == "postgresql":
        url = request.getfixturevalue("postgres_dsn").replace("postgresql:", "postgresql+psycopg:")
    module: Any = load(Page(ROOT / "docs/howto/flask.md").program("shop.py"), "shop.py", tmp_path, monkeypatch)
    app = module.create_app(url)
    with app.app_context():
        module.db.create_all()
        module.db.session.add(module.User(token=ANN, tenant="acme"))
        module.db.session.commit()
    client = app.test_client()

    def post(path: str, seat: str, key: str, token: str = ANN) -> Any:
        headers = {"Idempotency-Key": key, "Authorization": f"Bearer {token}"}
        return client.post(path, json={"seat": seat}, headers=headers)

    for path, seat in (("/orders", "1A"), ("/payments", "1B")):
        first, again = [post(path, seat, f"a-key-of-the-page{path}") for _ in "ab"]
        assert (first.status_code, again.status_code, again.data) == (201, 201, first.data)
        assert again.headers["Idempotent-Replayed"] == "true"
        assert post(path, seat, f"a-key-of-the-page{path}", "eve").status_code == 401
    for replayed in (None, "true"):
        taken = post("/orders", "1A", "another-key-of-the-page")
        assert (taken.status_code, taken.headers.get("Idempotent-Replayed")) == (409, replayed)
    headers = {"Authorization": f"Bearer {ANN}"}
    status = client.get("/idempotency-keys/another-key-of-the-page", headers=headers)
    assert (status.status_code, status.get_json()["state"]) == (200, "completed")
    assert client.get("/idempotency-keys/another-key-of-the-page").status_code == 401

    with app.app_context():
        found = module.db.session.execute(text("SELECT seat, charge IS NULL FROM orders ORDER BY seat")).all()
        assert [(seat, bool(unpaid)) for seat, unpaid in found] == [("1A", True), ("1B", False)]
        engine = module.db.engine
        stored = "oncekey_record" if kept_in == "sqlite" else "oncekey.record"
        assert ANN not in str(module.db.session.execute(text(f"SELECT * FROM {stored}")).all()), "no token is stored"
    assert engine.pool.checkedout() == 0
    engine.dispose()


def test_blocking_engine_of_the_guide_runs_functions_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = Page(ROOT / "docs/howto/sqlalchemy.md").program("blocking_engine.py")
    module: Any = load(with_store(page, lambda: ""), "blocking_engine.py", tmp_path, monkeypatch)
    with module.engine.begin() as connection:
        connection.execute(text("CREATE TABLE bookings (seat TEXT)"))
    assert [module.book("a number of bookings", "1A") for _ in "ab"] == [1, 1]
    assert module.book("another number of them", "1B") == 2
    module.engine.dispose()
