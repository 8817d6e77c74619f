"""A page's blocks, done in order as a reader would: files saved, commands typed, servers started, answers compared."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

import psycopg
import pymysql

from harness.demo import Demo
from harness.pages import ROOT, Block, Page
from harness.patience import PATIENCE, wait_until
from harness.ports import free_port, listens
from harness.valkeys import StoringValkey
from oncekey.databases.mariadb.address import MariadbAddress

DEMO_PORT = "8000"
REDIS_PORT = "6379"
PORTS = ("8001", "2525")
"""The ports that pages use besides the demo's; each walk puts free ones in their places."""

OUTPUT = ("http", "json", "text")
"""The languages of blocks that show what the commands before them print; `…` stands for anything."""

_STORE = re.compile(r"postgresql(?P<driver>\+\w+)?://localhost/shop(?P<options>\?[\w=&]+)?")

_MARIADB = "mariadb://localhost/shop"


class MissingToolError(Exception):
    """A program that readers need is not on this machine."""


class Walkthrough:
    """One page in a folder of its own. Leaving it ends every process that it started."""

    def __init__(
        self,
        page: Page,
        folder: Path,
        dsn: Callable[[], str],
        python: str = sys.executable,
        mariadb: Callable[[], str] | None = None,
    ) -> None:
        """`python` is the interpreter whose environment the reader has activated."""
        self._page, self._folder, self._dsn, self._python = page, folder, dsn, python
        self._mariadb = mariadb
        self._ports = {port: str(free_port()) for port in PORTS}
        self._demo: Demo | None = None
        self._servers: dict[str, subprocess.Popen[bytes]] = {}
        self._exported: dict[str, str] = {}
        self._printed: str | None = None
        self._valkey: StoringValkey | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for port in list(self._servers):
            self._end(port)
        if self._demo is not None:
            self._demo.kill()
        if self._valkey is not None:
            self._valkey.__exit__()

    def walk(self, section: str | None = None) -> None:
        """Do what the page says, or one section of it."""
        chosen = False
        for block in self._page.blocks() if section is None else self._page.section(section):
            where = f"{self._page.name}, line {block.line}"
            match block.language:
                case "python" if block.file is not None:
                    block.save(self._folder, self._here(block.text))
                case "sh":
                    self._printed = "".join(self._type(block, where))
                    last = block.text.rstrip().rpartition("\n")[2]
                    chosen = " | grep " in last or last.startswith("oncekey audit ")
                case "sql":
                    self._query(block)
                case language if language in OUTPUT and self._printed is not None:
                    self._compare(block, self._printed, where)
                    # `grep` chooses the lines that the page shows, and an audit is shown whole.
                    chosen = chosen and language == "text"
                    printed, shown = self._printed.strip().splitlines(), block.text.strip().splitlines()
                    assert not chosen or len(printed) <= len(shown), f"{where}: more was printed:\n{self._printed}"
                    self._printed = None

    def _type(self, block: Block, where: str) -> list[str]:
        """Type the commands of a block; those of the table below have their own way."""
        printed, plain = [], ""
        for line in block.text.splitlines(keepends=True):
            special = next((act for pattern, act in SPECIAL if pattern.fullmatch(line.strip())), None)
            if special is None:
                plain += line
                continue
            printed.append(self._run(plain, where))
            plain = ""
            special(self, line.strip())
        return [*printed, self._run(plain, where)]

    def _run(self, script: str, where: str) -> str:
        if not script.strip():
            return ""
        bash = _tool("bash")
        _tool("curl")
        environment = {
            **os.environ,
            **self._exported,
            "PATH": f"{Path(self._python).parent}{os.pathsep}{os.environ['PATH']}",
        }
        done = subprocess.run(
            [bash, "-euo", "pipefail", "-c", self._here(script)],
            cwd=self._folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE * 3,
        )
        assert done.returncode == 0, f"{where}: exit code {done.returncode}\n{script}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def _query(self, block: Block) -> None:
        if self._mariadb is not None and any(_MARIADB in one.text for one in self._page.blocks("sh")):
            address = MariadbAddress.parse(self._mariadb())
            with pymysql.connect(**address.options(), database=address.database, autocommit=True) as mariadb:
                mariadb.query(block.text)
            return
        with psycopg.connect(self._dsn(), autocommit=True) as connection:
            connection.execute(block.text.encode())

    def _compare(self, block: Block, printed: str, where: str) -> None:
        """Each line that is shown was printed, in this order; there may be more between and around them.

        A body has no line end of its own, so what one command prints may begin where another one's line ends.
        """
        end = 0
        for shown in filter(None, map(str.strip, self._here(block.text).splitlines())):
            pattern = re.compile("[^\n]*?".join(re.escape(part) for part in shown.split("…")))
            met = pattern.search(printed, end)
            assert met, f"{where}: {shown!r} was not printed (in this order):\n{printed}"
            end = met.end()

    def _here(self, text: str) -> str:
        """Put the addresses of this walk in the places of those that the page has."""
        for port, ours in self._ports.items():
            text = re.sub(rf"\b{port}\b", ours, text)
        if self._demo is not None:
            text = re.sub(rf"\b127\.0\.0\.1:{DEMO_PORT}\b", f"127.0.0.1:{self._demo.port}", text)
        if self._mariadb is not None and _MARIADB in text:
            text = text.replace(_MARIADB, self._mariadb())
        if self._valkey is not None:
            text = re.sub(rf"\b127\.0\.0\.1:{REDIS_PORT}\b", f"127.0.0.1:{self._valkey.port}", text)
        return _STORE.sub(self._store, text)

    def _store(self, found: re.Match[str]) -> str:
        return at(self._dsn(), found)

    # The special lines.

    def serve_demo(self, line: str) -> None:
        """`oncekey-demo`, or `make run`, which starts it; a second time is a crash and a restart."""
        assert re.search(r"^run:.*\n\t\$\(VENV\)/bin/oncekey-demo \$\(ARGS\)$", _makefile(), re.MULTILINE)
        if self._demo is None:
            self._demo = Demo(self._folder, *shlex.split(" ".join(re.findall(r'ARGS="([^"]*)"', line))))
        self._demo.kill()
        self._demo.start()

    def check_target(self, line: str) -> None:
        """`make something`: there is such a target."""
        target = line.split()[1]
        assert re.search(rf"^{re.escape(target)}:", _makefile(), re.MULTILINE), f"the Makefile has no {target}"

    def check_extras(self, line: str) -> None:
        """`pip install 'oncekey[extras]'`, or a distribution beside it: there are such extras."""
        named = re.search(r"(oncekey[a-z-]*)(?:\[([\w,]+)\])?", line)
        assert named is not None
        missing = set((named[2] or "").split(",")) - {"", *_extras(named[1])}
        assert not missing, f"{named[1]} has no extra {missing}"

    def create_database(self, line: str) -> None:
        """`createdb shop`: the walk has an empty database in the place of the one that the page's addresses name."""
        assert _STORE.search(f"postgresql://localhost/{line.split()[1]}"), "the page's addresses name another database"
        with psycopg.connect(self._dsn()) as connection:
            found = connection.execute("SELECT count(*) FROM pg_tables WHERE schemaname IN ('public', 'oncekey')")
            assert found.fetchone() == (0,), "a database that was just created has no tables"

    def serve_valkey(self, line: str) -> None:
        """`valkey-server --port 6379 ...`: a private one, with the options of the page."""
        words = line.split()
        assert words[1:3] == ["--port", REDIS_PORT]
        self._valkey = StoringValkey(*words[3:]).start()

    def use_environment(self, line: str) -> None:
        """`. .venv/bin/activate`: every command of a walk finds the environment of the tests first."""
        assert line == ". .venv/bin/activate"

    def take_file(self, line: str) -> None:
        """`cp examples/some.py .`: the file of this checkout."""
        shutil.copy(ROOT / line.split()[1], self._folder)

    def export(self, line: str) -> None:
        """`export NAME=value`: for everything that is typed after it."""
        name, _, value = self._here(line.removeprefix("export ")).partition("=")
        self._exported[name] = value

    def serve(self, line: str) -> None:
        """A server in a terminal of its own; one that has the same port was stopped by the reader."""
        words = self._here(line).split()
        port = words[-1] if words[-1].isdigit() else self._ports["2525"]
        self._end(port)
        match words[0]:
            case "uvicorn" | "flask":
                command = [self._python, "-m", *words]
            case "oncekey":
                command = [self._python, "-c", "from oncekey.cli import main; main()", *words[1:]]
            case _:
                command = [self._python, *words[1:]]
        if "runserver" in words:
            command.append("--noreload")  # the process that would watch the files is another one
        log = self._folder / f"server-{port}.log"
        with log.open("ab") as output:
            environment = {**os.environ, **self._exported}
            process = subprocess.Popen(command, cwd=self._folder, stdout=output, stderr=output, env=environment)
        self._servers[port] = process
        wait_until(
            lambda: listens(int(port)) or process.poll() is not None,
            lambda: f"{line} does not listen:\n{log.read_text()}",
        )
        assert process.poll() is None, f"{line} ended:\n{log.read_text()}"

    def _end(self, port: str) -> None:
        process = self._servers.pop(port, None)
        if process is not None:
            process.kill()
            process.wait()


SPECIAL: tuple[tuple[re.Pattern[str], Callable[[Walkthrough, str], None]], ...] = (
    (re.compile(r"oncekey-demo|make run(?: ARGS=\"[^\"]*\")?"), Walkthrough.serve_demo),
    (re.compile(r"make (?:install|test|check|bench|help)"), Walkthrough.check_target),
    (re.compile(r"pip install '?oncekey(?:-[a-z]+)?(?:\[[\w,]+\])?'?(?: [a-z-]+)*"), Walkthrough.check_extras),
    (re.compile(r"createdb \w+"), Walkthrough.create_database),
    (re.compile(r"\. \.venv/bin/activate"), Walkthrough.use_environment),
    (re.compile(r"valkey-server --port 6379(?: --[a-z-]+ [a-z]+)*"), Walkthrough.serve_valkey),
    (re.compile(r"cp (?:examples|contrib)/[\w./-]+ \."), Walkthrough.take_file),
    (re.compile(r"uvicorn \w+:app --port 8001"), Walkthrough.serve),
    (re.compile(r"export [A-Z_]+=\S+"), Walkthrough.export),
    (re.compile(r"python -m moto\.server -H 127\.0\.0\.1 -p 2525"), Walkthrough.serve),
    (re.compile(r"python postman\.py"), Walkthrough.serve),
    (re.compile(r"python manage\.py runserver 8001"), Walkthrough.serve),
    (re.compile(r"flask --app wsgi run --port 8001"), Walkthrough.serve),
    (re.compile(r"oncekey console --store \S+ --as \w+ --port 2525"), Walkthrough.serve),
    (re.compile(r"oncekey provider --port 2525 --ledger \S+(?: --webhooks \S+ --secret \w+)?"), Walkthrough.serve),
)
"""Lines that are not typed as they are, and what is done instead. Every other line is."""


def at(dsn: str, found: re.Match[str]) -> str:
    """The test's database in the place of the one that a page names, with the page's driver and options."""
    parts = urlsplit(dsn)
    options = "&".join(filter(None, [parts.query, (found["options"] or "").removeprefix("?")]))
    return parts._replace(scheme=f"postgresql{found['driver'] or ''}", query=options).geturl()


def with_store(text: str, dsn: Callable[[], str]) -> str:
    """A program with the test's database in the place of the one that it names, if it names one."""
    return _STORE.sub(lambda found: at(dsn(), found), text)


def _tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise MissingToolError(
            f"the commands of the documentation need {name}: install it (Debian: apt install {name})"
        )
    return found


def _makefile() -> str:
    return (ROOT / "Makefile").read_text()


def _extras(distribution: str) -> dict[str, object]:
    folder = ROOT if distribution == "oncekey" else ROOT / "packages" / distribution
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    extras: dict[str, object] = project.get("optional-dependencies", {})
    return extras
