"""The examples, each started by the command of examples/README.md in a folder of its own, and asked from outside."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from harness.brokers import Valkey
from harness.demo import get
from harness.pages import ROOT, Page
from harness.patience import PATIENCE, wait_until
from harness.ports import free_port

PAGE = Page(ROOT / "examples" / "README.md")
AS_ACME = {"Authorization": "Bearer token-of-acme"}
KEY = "0f1d2c3b-4a59-4687-8796-a5b4c3d2e1f0"


def command(beginning: str, port: int = 8001) -> str:
    """The command of the page that begins so, on another port."""
    lines = "\n".join(block.text for block in PAGE.blocks("sh")).replace("\\\n", " ").splitlines()
    (found,) = [line for line in lines if line.startswith(beginning)]
    return found.replace("8001", str(port))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working folder with the examples in it, as the repository has them."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT / "src"), **more}


@contextmanager
def running(line: str, folder: Path, **more: str) -> Iterator[Path]:
    """A command in the background, and the file that it writes to."""
    log = folder / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            ["bash", "-c", f"exec env {line}"],
            cwd=folder,
            env=environment(**more),
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        yield log
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run(line: str, folder: Path, **more: str) -> str:
    done = subprocess.run(
        ["bash", "-c", line], cwd=folder, env=environment(**more), capture_output=True, text=True, timeout=4 * PATIENCE
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def serves(url: str) -> bool:
    try:
        return get(f"{url}/orders", headers=AS_ACME).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.parametrize("server", ["uvicorn", "gunicorn"])
def test_a_shop_keeps_every_promise(server: str, folder: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with running(command(server, port), folder) as log:
        wait_until(lambda: serves(url), log.read_text, every=0.1)
        with httpx.Client(base_url=url, headers=AS_ACME, timeout=PATIENCE, verify=False) as client:

            def send(path: str, body: object, key: str) -> httpx.Response:
                return client.post(path, json=body, headers={"Idempotency-Key": f'"{key}-{path}"'})

            for path, body in (
                ("/orders", {"product": "tea", "quantity": 1}),
                ("/payments", {"cents": 5}),
                ("/charges", {"cents": 6}),
            ):
                first, again = send(path, body, KEY), send(path, body, KEY)
                assert (first.status_code, again.status_code, again.content) == (201, 201, first.content), (
                    log.read_text()
                )
                assert again.headers["Idempotent-Replayed"] == "true"
            assert send("/transfers", {"cents": 7}, KEY).status_code == 202
            wait_until(lambda: send("/transfers", {"cents": 7}, KEY).status_code == 201, log.read_text, every=0.1)
        said = run(f"{sys.executable} -c 'from provider import *; print(charges())'", folder, PYTHONPATH="examples")
        assert [int(cents) for cents in re.findall(r", (\d+)\)", said)] == [5, 6, 7]
        assert ", 0 failed, 0 advice, " in run(command("oncekey check", port), folder)


def test_a_task_that_is_delivered_three_times_charges_once(folder: Path) -> None:
    with Valkey() as broker, running(command("PYTHONPATH=examples celery"), folder, BROKER=broker.url) as log:
        run(command("python examples"), folder, BROKER=broker.url)

        def told() -> list[str]:
            return sorted(re.findall(r"(HANDLED|DUPLICATE) (ch_\d+)", log.read_text()))

        wait_until(lambda: len(told()) == 3, log.read_text, every=0.1)
    assert told() == [("DUPLICATE", "ch_1"), ("DUPLICATE", "ch_1"), ("HANDLED", "ch_1")]
