"""The distributions under `packages`: one version, and each works alone, from its wheel, with what it declares."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from client.scripted import DROP, ScriptedServer, answer
from conformance.shop import Shop
from harness.alone import PROJECTS, ROOT, add, applies, built, installed, requirements
from harness.pages import Page
from harness.patience import PATIENCE
from harness.walkthrough import Walkthrough
from oncekey_client import Journal
from oncekey_client.exchange import Call

PACKAGES = sorted(set(PROJECTS) - {"oncekey"})
NEEDS = {
    "oncekey-check": set(),
    "oncekey-client": set(),
    "oncekey-contract": {"oncekey"},
    "oncekey-demo": {"oncekey", "httptools", "uvicorn", "uvloop"},
}
"""What the base install of each brings."""
BEYOND = {
    "oncekey-check": set(),
    "oncekey-client": {"oncekey_client.aiohttp", "oncekey_client.command", "oncekey_client.requests"},
}
"""The modules that import more than the standard library."""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folder = tmp_path_factory.mktemp("wheels")
    return {name: built(name, folder) for name in PROJECTS}


def _project(name: str) -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((PROJECTS[name] / "pyproject.toml").read_text())["project"]
    return project


def _module(name: str) -> str:
    return name.replace("-", "_")


def _run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("name", PACKAGES)
def test_all_have_one_version_and_one_licence(name: str) -> None:
    ours, library = _project(name), _project("oncekey")
    for key in ("version", "license", "license-files", "requires-python"):
        assert ours[key] == library[key]
    assert (PROJECTS[name] / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_the_changelog_begins_with_this_version() -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    released = [heading for heading in headings if heading != "[Unreleased]"]
    assert re.fullmatch(rf"\[{re.escape(_project('oncekey')['version'])}\] - \d{{4}}-\d\d-\d\d", released[0])


@pytest.mark.parametrize("name", PACKAGES)
def test_every_file_of_the_package_is_in_the_wheel_and_no_other(name: str, wheels: Mapping[str, Path]) -> None:
    source = PROJECTS[name] / "src"
    files = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    files = {file for file in files if "__pycache__" not in file}
    with zipfile.ZipFile(wheels[name]) as archive:
        packed = {file for file in archive.namelist() if ".dist-info/" not in file}
        legal = [file for file in archive.namelist() if file.endswith(".dist-info/licenses/LICENSE")]
    assert packed == files
    assert f"{_module(name)}/py.typed" in packed
    assert legal


@pytest.mark.parametrize("name", PACKAGES)
def test_base_install_requires_only_the_listed_packages(name: str, wheels: Mapping[str, Path]) -> None:
    assert {need.name for need in requirements(wheels[name]) if applies(need)} == NEEDS[name]


@pytest.mark.parametrize("name", sorted(BEYOND))
def test_the_modules_import_nothing_but_the_standard_library(name: str, wheels: Mapping[str, Path]) -> None:
    with zipfile.ZipFile(wheels[name]) as archive:
        files = [file for file in archive.namelist() if file.endswith(".py")]
    modules = {file.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for file in files}
    assert BEYOND[name] <= modules
    # Isolated and without site, so that only the standard library and the wheel can be seen.
    program = (
        "import importlib, sys; sys.path.insert(0, sys.argv[1])\n"
        "for name in sys.argv[2:]: importlib.import_module(name)\n"
    )
    chosen = sorted(modules - BEYOND[name])
    _run(sys.executable, "-I", "-S", "-W", "error", "-c", program, wheels[name], *chosen, cwd=ROOT)


def _finds(module: str, programs: Path) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([programs / "python", "-I", "-c", code], check=False).returncode == 0


# oncekey


def test_library_wheel_alone_runs_the_readme_quick_start(
    wheels: Mapping[str, Path], tmp_path: Path, postgres_dsn: str
) -> None:
    readme = Page(ROOT / "README.md")
    told = re.search(r"^pip install (.+)$", readme.text, re.MULTILINE)
    assert told is not None
    programs = installed(told[1].replace("'", ""), wheels, tmp_path / "alone")
    (tmp_path / "shop").mkdir()
    with Walkthrough(readme, tmp_path / "shop", lambda: postgres_dsn, python=str(programs / "python")) as walkthrough:
        walkthrough.walk("Quick start")  # the order is sent twice over a socket, and its second answer is a replay
    with psycopg.connect(postgres_dsn) as connection:
        assert connection.execute("SELECT tenant, product FROM orders").fetchall() == [("acme", "tea")]
    assert not any(
        _finds(module, programs) for module in ("oncekey_check", "oncekey_client", "oncekey_demo", "psycopg")
    )


# oncekey-check


@contextmanager
def _api() -> Iterator[list[str]]:
    """A server that is not ours, and the words that describe it."""
    with Shop() as shop:
        body, header = '{"item": "teapot", "quantity": 2}', "Authorization: Bearer alpha"
        few = ("--only", "keys.missing", "--only", "replays.one-effect", "--patience", "0.5")
        count = ("--count-url", f"{shop.url}/orders", "--count-pointer", "/total")
        yield [f"{shop.url}/orders", "--body", body, "--header", header, *count, *few, "--json"]


def test_the_tester_alone_checks_an_api(wheels: Mapping[str, Path], tmp_path: Path) -> None:
    programs = installed("oncekey-check", wheels, tmp_path / "alone")
    with _api() as words:
        report = json.loads(_run(programs / "oncekey-check", *words, cwd=tmp_path))
    assert report["oncekey-check"] == _project("oncekey")["version"]
    assert (report["passed"], report["failed"]) == (2, 0)
    assert report["command"].startswith("oncekey-check http://")
    assert not _finds("oncekey", programs)
    assert sorted(path.name for path in programs.glob("oncekey*")) == ["oncekey-check"]


def test_oncekey_check_adds_its_command_to_the_oncekey_cli(wheels: Mapping[str, Path], tmp_path: Path) -> None:
    programs = installed("oncekey[cli]", wheels, tmp_path / "library")
    without = subprocess.run([programs / "oncekey", "check"], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (without.returncode, without.stdout) == (2, "")
    assert without.stderr == "oncekey check is in another package: pip install oncekey-check\n"
    add(wheels["oncekey-check"], programs)
    with _api() as words:
        assert json.loads(_run(programs / "oncekey", "check", *words, cwd=tmp_path))["failed"] == 0


# oncekey-client

SENDING = {
    "httpx": """
import httpx
from oncekey_client.httpx import OncekeyTransport

with httpx.Client(transport=OncekeyTransport()) as client:
    print(client.post(URL, json={"quantity": 2}).status_code)
""",
    "requests": """
import requests
from oncekey_client.requests import OncekeyAdapter

with requests.Session() as session:
    session.mount("http://", OncekeyAdapter())
    print(session.post(URL, json={"quantity": 2}).status_code)
""",
    "aiohttp": """
import asyncio
import aiohttp
from oncekey_client.aiohttp import OncekeyClientMiddleware

async def main():
    async with aiohttp.ClientSession(middlewares=[OncekeyClientMiddleware()]) as session:
        async with session.post(URL, json={"quantity": 2}) as response:
            print(response.status)

asyncio.run(main())
""",
}


@pytest.mark.parametrize("extra", SENDING)
def test_the_client_alone_retries_with_one_key(extra: str, wheels: Mapping[str, Path], tmp_path: Path) -> None:
    programs = installed(f"oncekey-client[{extra}]", wheels, tmp_path / "alone")
    with ScriptedServer(DROP, answer(201)) as server:
        printed = _run(programs / "python", "-I", "-c", f"URL = {server.url!r}\n{SENDING[extra]}", cwd=tmp_path)
    assert printed == "201\n"
    first, second = server.seen
    assert first.key == second.key
    assert not any(_finds(module, programs) for module in {"oncekey", "typer", *SENDING} - {extra})


def test_oncekey_client_command_requires_its_extra(wheels: Mapping[str, Path], tmp_path: Path) -> None:
    programs = installed("oncekey-client[cli]", wheels, tmp_path / "cli")
    Journal(tmp_path / "journal.db").begin(Call("POST", "http://shop.example/"), "key-1", name=None, profile="ietf")
    command = [programs / "oncekey-client", "list", "--journal", "journal.db"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (shown.returncode, shown.stdout.splitlines()[1].split()[:2]) == (1, ["open", "key-1"])
    programs = installed("oncekey-client", wheels, tmp_path / "base")
    without = subprocess.run([programs / "oncekey-client"], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (without.returncode, without.stdout) == (2, "")
    assert without.stderr == "oncekey-client needs another package: pip install 'oncekey-client[cli]'\n"


# oncekey-contract


def test_store_guide_works_with_the_packages_it_installs(wheels: Mapping[str, Path], tmp_path: Path) -> None:
    page = Page(ROOT / "docs/howto/write-a-store.md")
    install, copy, run = (line.split() for block in page.blocks("sh") for line in block.text.splitlines())
    assert install[:2] == ["pip", "install"]
    programs = installed(" ".join(install[2:]), wheels, tmp_path / "alone")
    (test,) = page.blocks("python")
    (tmp_path / run[1]).write_text(test.text)
    example = (ROOT / copy[1]).read_text()
    (tmp_path / "sqlite_cells.py").write_text(example)
    command = (programs / "python", "-m", *run, "-q")
    printed = _run(*command, cwd=tmp_path)
    passed = re.search(r"^(\d+) passed in", printed, re.MULTILINE)
    assert passed is not None
    assert int(passed[1]) > 100
    # The same store without a comparison of versions is refused.
    (tmp_path / "sqlite_cells.py").write_text(example.replace(" AND version = :seen_version", ""))
    broken = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (broken.returncode, "failed" in broken.stdout.splitlines()[-1]) == (1, True)


# oncekey-demo


def test_the_demo_alone_serves_its_shop(wheels: Mapping[str, Path], tmp_path: Path) -> None:
    programs = installed("oncekey-demo", wheels, tmp_path / "alone")
    (need,) = (need for need in requirements(wheels["oncekey-demo"]) if need.name == "oncekey")
    assert str(need.specifier) == f"=={_project('oncekey')['version']}"
    served = subprocess.Popen(
        [programs / "oncekey-demo", "--port", "0"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    try:
        assert served.stdout is not None
        url = re.search(r"http://127\.0\.0\.1:\d+", served.stdout.readline())
        assert url is not None
        order = {"customer_id": "c-1", "items": [{"product_id": "p-1", "quantity": 2}]}
        headers = {"Authorization": "Bearer demo-alpha", "Idempotency-Key": '"8e03978e-40d5-43e8-bc93-6894a57f9324"'}
        first, second = (httpx.post(f"{url[0]}/orders", json=order, headers=headers) for _ in range(2))
    finally:
        served.send_signal(signal.SIGINT)
        served.communicate(timeout=PATIENCE)
    assert (first.status_code, second.headers["Idempotent-Replayed"], second.content) == (201, "true", first.content)
    for command in ("demo", "provider", "torture"):
        assert f"Usage: oncekey {command} " in _run(programs / "oncekey", command, "--help", cwd=tmp_path)
    assert not any(_finds(module, programs) for module in ("oncekey_check", "oncekey_client", "httpx", "psycopg"))
