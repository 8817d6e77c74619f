"""The project of the guide to Django does what the page says, in processes of its own."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from harness.pages import ROOT, Page
from harness.patience import PATIENCE
from harness.tables import leases_run_out

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
said = [ask("/orders/", {"product": "tea"}, "7e0f5b1c-3a52-4c1e-9d87-2f6b80a4c913") for _ in range(2)]
said += [ask("/orders/1/rename/", {"product": "milk"}, "b54d0c67-91fe-4a3b-8c20-6a1d7e53f0b8") for _ in range(2)]
said += [ask("/payments", {"amount": 5}, "0c8e64f1-5d27-4b9a-a36e-91f20d7b45ce") for _ in range(2)]
print(json.dumps([said, client.post("/orders/", {"product": "tea"}).status_code]))
"""
USER = 'User.objects.create_user("ann", password="secret")'
PAYING = """
import django, os, signal, sys
django.setup()
from shop import views
charge = views.charge
def counted(amount, key):
    made = charge(amount, key=key)
    with open("charges", "a") as file:
        file.write(key + chr(10))
    if sys.argv[1] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    return made
views.charge = counted
from base64 import b64encode
from django.test import Client
headers = {"Authorization": "Basic " + b64encode(b"ann:secret").decode(), "Idempotency-Key": "payment-of-ann-7e0f5b1c"}
answer = Client().post("/payments", {"amount": 7}, content_type="application/json", headers=headers)
print(answer.status_code, answer.content.decode(), answer.headers.get("Idempotent-Replayed"))
"""
WORKING = """
import django
django.setup()
from shop import views
charge = views.charge
def counted(amount, key):
    with open("charges", "a") as file:
        file.write(key + chr(10))
    return charge(amount, key=key)
views.charge = counted
from django.core.management import execute_from_command_line as run
run(["manage.py", "oncekey", "worker", "--once"])
"""
STATUS = """
import django, json
django.setup()
from base64 import b64encode
from django.contrib.auth.models import User
from django.test import Client
User.objects.create_user("bob", password="secret")
def ask(name):
    token = "Basic " + b64encode((name + ":secret").encode()).decode()
    return Client().get("/idempotency-keys/payment-of-ann-7e0f5b1c", headers={"Authorization": token} if name else {})
print(json.dumps([[one.status_code, one.json()] for one in map(ask, ["ann", "bob", ""])]))
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


def run(folder: Path, *command: str, code: int = 0) -> str:
    environ = {**os.environ, "DJANGO_SETTINGS_MODULE": "shop.settings"}
    environ["PYTHONPATH"] = os.pathsep.join([str(folder), str(ROOT / "src"), str(ROOT / "tests")])
    said = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert said.returncode == code, said.stdout + said.stderr
    return said.stdout + said.stderr


def migrate(project: Path) -> None:
    """The page's own models have no migrations yet."""
    run(project, "manage.py", "migrate", "--run-syncdb", "--verbosity", "0")


def test_django_guide_project_works_as_described(project: Path) -> None:
    lines = [shlex.split(line) for block in PAGE.blocks("sh") for line in block.text.splitlines()]
    installing, *commands = lines
    assert installing[:2] == ["pip", "install"]
    assert all(words[:2] == ["python", "manage.py"] for words in commands)
    for words in commands:
        said_by = run(project, *words[1:])
        assert words[2] != "check" or "no issues" in said_by
    said, nobody = json.loads(run(project, "-c", ASKING).splitlines()[-1])
    order, renamed, paid = {"id": 1, "product": "tea"}, {"id": 1, "product": "milk"}, {"id": 1, "charge": "ch_1"}
    assert said[:2] == [[201, order, None], [201, order, "true"]]
    assert said[2:4] == [[200, renamed, None], [200, renamed, "true"]]
    assert said[4:] == [[201, paid, None], [201, paid, "true"]]
    assert nobody == 401


def test_worker_completes_a_django_payment_whose_process_was_killed(
    project: Path,
) -> None:
    migrate(project)
    run(project, "-c", "import django; django.setup(); from django.contrib.auth.models import User\n" + USER)
    run(project, "-c", PAYING, "die", code=-signal.SIGKILL)
    leases_run_out(f"sqlite:///{project}/shop.db")
    mine, others, nobody = json.loads(run(project, "-c", STATUS).splitlines()[-1])
    assert (mine[0], mine[1]["state"], others[0], nobody[0]) == (200, "in_progress", 404, 401)

    run(project, "-c", WORKING)
    with closing(sqlite3.connect(project / "shop.db")) as connection:
        assert connection.execute("SELECT amount, charge FROM shop_payment").fetchall() == [(7, "ch_1")]
    assert len(set((project / "charges").read_text().split())) == 1, "the worker repeats the call with the same key"
    paid = run(project, "-c", PAYING, "live").splitlines()[-1]
    assert paid == '201 {"id":1,"charge":"ch_1"} true'


@pytest.mark.parametrize(
    ("without", "instead", "finding"),
    [
        (
            '        "shop.once.Resumed",\n',
            "",
            "oncekey.W004) pay has effects=PHASED, and a worker that resumes",
        ),
        ("user_id = resumed_as(request)", "user_id = None", "oncekey.W004) pay has effects=PHASED"),
        (
            'key>", key_status)',
            'key>", once.status_view)',
            "oncekey.W005) once.status_view is routed directly",
        ),
        (
            '    path("idempotency-keys/<path:key>", key_status),\n',
            "",
            "oncekey.W006) status='/idempotency-keys'",
        ),
    ],
)
def test_django_check_reports_the_warnings_of_the_guide(
    project: Path, without: str, instead: str, finding: str
) -> None:
    for file in ("settings", "once", "urls"):
        path = project / "shop" / f"{file}.py"
        path.write_text(path.read_text().replace(without, instead))
    if "once.status_view" in instead:
        urls = project / "shop" / "urls.py"
        urls.write_text("from shop.once import once\n" + urls.read_text())
    said = run(project, "manage.py", "check")
    assert finding in said
    assert said.count("oncekey.W") == 1
