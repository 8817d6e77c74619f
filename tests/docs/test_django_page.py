"""The project of the guide to Django, and the example, do what the page says: in processes of their own."""

from __future__ import annotations

import http.client
import json
import os
import shlex
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from harness.pages import ROOT, Page
from harness.patience import PATIENCE, wait_until
from harness.ports import free_port

PAGE = Page(ROOT / "docs/howto/django.md")
MANAGE = "import sys; from django.core.management import execute_from_command_line as run; run(sys.argv)"
ASKING = """
import django, json
django.setup()
from django.contrib.auth.models import User
from django.test import Client
from base64 import b64encode
User.objects.create_user("ann", password="secret")
token = "Basic " + b64encode(b"ann:secret").decode()
client = Client()
def ask(path, body, key):
    headers = {"Authorization": token, "Idempotency-Key": key}
    answer = client.post(path, body, content_type="application/json", headers=headers)
    return [answer.status_code, answer.json(), answer.headers.get("Idempotent-Replayed")]
said = [ask("/orders/", {"product": "tea"}, "k" * 20) for _ in range(2)]
said += [ask("/orders/1/rename/", {"product": "milk"}, "l" * 20) for _ in range(2)]
said += [ask("/payments", {"amount": 5}, "m" * 20) for _ in range(2)]
print(json.dumps([said, client.post("/orders/", {"product": "tea"}).status_code]))
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The files of the page."""
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "__init__.py").touch()
    (tmp_path / "manage.py").write_text(MANAGE)
    files = [block for block in PAGE.blocks("python") if block.file is not None]
    assert len(files) == len(PAGE.blocks("python")) == 5
    for block in files:
        (tmp_path / str(block.file)).write_text(block.text)
    return tmp_path


def run(folder: Path, *command: str) -> str:
    environ = {**os.environ, "DJANGO_SETTINGS_MODULE": "shop.settings"}
    environ["PYTHONPATH"] = os.pathsep.join([str(folder), str(ROOT / "src")])
    said = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert said.returncode == 0, said.stdout + said.stderr
    return said.stdout


def test_the_project_of_the_page(project: Path) -> None:
    lines = [shlex.split(line) for block in PAGE.blocks("sh") for line in block.text.splitlines()]
    installing, *commands = lines
    assert installing[:2] == ["pip", "install"]
    assert all(words[:2] == ["python", "manage.py"] for words in commands)
    run(
        project, "manage.py", "migrate", "--run-syncdb", "--verbosity", "0"
    )  # the page's own models have no migrations yet
    for words in commands:
        run(project, *words[1:])
    said, nobody = json.loads(run(project, "-c", ASKING).splitlines()[-1])
    order, renamed, paid = {"id": 1, "product": "tea"}, {"id": 1, "product": "milk"}, {"id": 1, "charge": "ch_1"}
    assert said[:2] == [[201, order, None], [201, order, "true"]]
    assert said[2:4] == [[200, renamed, None], [200, renamed, "true"]]
    assert said[4:] == [[201, paid, None], [201, paid, "true"]]
    assert nobody == 401


def test_the_example_is_started_by_one_command(tmp_path: Path) -> None:
    port = free_port()
    environ = {**os.environ, "SHOP_DATABASE": str(tmp_path / "shop.db"), "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, str(ROOT / "examples/django_shop.py"), "--port", str(port)]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline().strip() == f"http://127.0.0.1:{port}"
            wait_until(lambda: _listens(port), "the example does not listen")
            orders = [_post(port, "/orders", {"product_id": "p-1", "quantity": 2}, "k" * 20) for _ in range(2)]
            payments = [_post(port, "/payments", {"amount_cents": 1999}, "l" * 20) for _ in range(2)]
            wrong = _post(port, "/orders", {"product_id": "p-1"}, "m" * 20)
            mended = _post(port, "/orders", {"product_id": "p-1", "quantity": 1}, "m" * 20)
            nobody = _post(port, "/orders", {}, "n" * 20, token="somebody-else")
        finally:
            server.kill()
    assert [one[:2] for one in orders] == [(201, {"id": 1, "status": "created"})] * 2
    assert (payments[0][:2], payments[0][1]["id"]) == (payments[1][:2], 1)
    assert [one[2] for one in (*orders, *payments)] == [None, "true", None, "true"]
    assert (wrong[0], mended[0], nobody[0]) == (400, 201, 401)


def _listens(port: int) -> bool:
    with closing(socket.socket()) as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _post(port: int, path: str, body: Any, key: str, token: str = "token-of-ann") -> tuple[int, Any, str | None]:
    headers = {"Authorization": f"Bearer {token}", "Idempotency-Key": key, "Content-Type": "application/json"}
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)) as connection:
        connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read()), response.headers.get("Idempotent-Replayed")
