"""The project of the guide to Django does what the page says, in processes of its own."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from harness.pages import ROOT, Page
from harness.patience import PATIENCE

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
