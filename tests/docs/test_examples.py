"""The examples, each started by the command of examples/README.md in a folder of its own, and asked from outside."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
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
SHOPS = ["fastapi_shop", "flask_shop", "django_shop", "litestar_shop"]
HOLDING = """
import time

answering = charge


def charge(cents, *, key):
    made = answering(cents, key=key)
    while Path("held").exists():
        time.sleep(0.01)
    return made
"""
"""What makes the provider charge at once, and answer when the file is gone."""
LAST = "test_a_shop_that_is_killed"
Paid = Future[tuple[httpx.Response, httpx.Response]]


def command(words: str, port: int = 8001) -> str:
    """The command of the page that has these words in it, on another port."""
    lines = "\n".join(block.text for block in PAGE.blocks("sh")).replace("\\\n", " ").splitlines()
    (found,) = [line for line in lines if words in line]
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


@contextmanager
def shop(name: str, port: int, folder: Path) -> Iterator[Path]:
    """A shop that serves until it is killed at the end of the block, and its log."""
    with running(command(f" {name}:app", port), folder) as log:
        wait_until(lambda: serves(f"http://127.0.0.1:{port}"), log.read_text, every=0.1)
        yield log


def acme(port: int) -> httpx.Client:
    """A client of the shop."""
    return httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=AS_ACME, timeout=PATIENCE, verify=False)


def charged(folder: Path) -> list[int]:
    """The cents of every charge, as the provider of the examples tells them."""
    said = run(f"{sys.executable} -c 'from provider import *; print(charges())'", folder, PYTHONPATH="examples")
    return [int(cents) for cents in re.findall(r", (\d+)\)", said)]


def pay_around_a_kill(name: str, folder: Path) -> tuple[httpx.Response, httpx.Response]:
    """Kill a shop after its provider has charged, start it again, and pay until there is an answer; it and a repeat."""
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    with (folder / "examples" / "provider.py").open("a") as provider:
        provider.write(HOLDING)
    port, held = free_port(), folder / "held"

    def pay(client: httpx.Client) -> httpx.Response:
        return client.post("/payments", json={"cents": 1999}, headers={"Idempotency-Key": f'"{KEY}"'})

    held.touch()
    with acme(port) as client, ThreadPoolExecutor(1) as waiting:
        with shop(name, port, folder) as log:
            unanswered = waiting.submit(pay, client)
            wait_until(lambda: unanswered.done() or charged(folder) == [1999], log.read_text, every=0.1)
            assert not unanswered.done(), log.read_text()
        with pytest.raises(httpx.TransportError):
            unanswered.result()
    held.unlink()
    with shop(name, port, folder) as log, acme(port) as client:
        wait_until(lambda: pay(client).status_code != 409, log.read_text, every=0.5)
        return pay(client), pay(client)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Path, Paid]]]:
    """Every shop is killed at once, and waits for the lease of its dead owner while other tests run."""
    folders = {name: tmp_path_factory.mktemp(name) for name in SHOPS}
    with ThreadPoolExecutor(len(SHOPS)) as pool:
        yield {name: (folder, pool.submit(pay_around_a_kill, name, folder)) for name, folder in folders.items()}


@pytest.fixture(scope="module", autouse=True)
def begun(request: pytest.FixtureRequest) -> None:
    """Kill the shops before the first test of this page: the last one is about them."""
    if any(item.name.startswith(LAST) for item in request.session.items):
        request.getfixturevalue("killed")


@pytest.mark.parametrize("name", SHOPS)
def test_example_shop_passes_the_conformance_check(name: str, folder: Path) -> None:
    port = free_port()
    with shop(name, port, folder) as log, acme(port) as client:

        def send(path: str, body: object) -> httpx.Response:
            return client.post(path, json=body, headers={"Idempotency-Key": f'"{KEY}-{path}"'})

        assert client.post("/orders", json={}, headers={"Authorization": "Bearer no-token"}).status_code == 401
        for path, body in (
            ("/orders", {"product": "tea", "quantity": 1}),
            ("/payments", {"cents": 5}),
            ("/charges", {"cents": 6}),
        ):
            wrong = send(path, {"cents": "many"})  # it does not use up the key
            assert wrong.status_code in {400, 422}, log.read_text()
            first, again = send(path, body), send(path, body)
            assert (first.status_code, again.status_code, again.content) == (201, 201, first.content), log.read_text()
            assert again.headers["Idempotent-Replayed"] == "true"
        assert client.get("/orders").json() == [{"id": 1, "product": "tea", "quantity": 1}]
        assert send("/transfers", {"cents": 7}).status_code == 202
        wait_until(lambda: send("/transfers", {"cents": 7}).status_code == 201, log.read_text, every=0.1)
        assert charged(folder) == [5, 6, 7]
        assert ", 0 failed, 0 advice, " in run(command("oncekey-check", port), folder)


def test_a_task_that_is_delivered_three_times_charges_once(folder: Path) -> None:
    with Valkey() as broker, running(command("celery -A"), folder, BROKER=broker.url) as log:
        run(command("celery_tasks.py"), folder, BROKER=broker.url)

        def told() -> list[str]:
            return sorted(re.findall(r"(HANDLED|DUPLICATE) (ch_\d+)", log.read_text()))

        wait_until(lambda: len(told()) == 3, log.read_text, every=0.1)
    assert told() == [("DUPLICATE", "ch_1"), ("DUPLICATE", "ch_1"), ("HANDLED", "ch_1")]


@pytest.mark.parametrize("name", SHOPS)
def test_a_shop_that_is_killed_after_the_charge_has_one_charge(name: str, killed: dict[str, tuple[Path, Paid]]) -> None:
    folder, future = killed[name]
    paid, again = future.result()

    assert (paid.status_code, paid.json()) == (201, {"id": 1, "charge": "ch_1"}), (folder / "log").read_text()
    assert (again.content, again.headers["Idempotent-Replayed"]) == (paid.content, "true")
    assert charged(folder) == [1999]
