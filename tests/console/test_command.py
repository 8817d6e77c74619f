"""`oncekey console`, and the console of the demo: started as people start them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager

import httpx
import pytest

from console.trouble import fill, opened
from console.visiting import ANN
from harness.demo import Demo
from harness.ports import free_port
from oncekey.cli.console import check_host
from oncekey.core.errors import ConfigurationError

COMMAND = (sys.executable, "-c", "from oncekey.cli import main; main()", "console")


@pytest.fixture
def store(tmp_path):
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    with opened(url) as world:
        fill(world, finished=2)
    return url


@contextmanager
def running(*options, **variables):
    """The command, and the line that it says first."""
    environment = {**os.environ, **variables}
    with subprocess.Popen(
        [*COMMAND, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            yield process.stdout.readline()
        finally:
            process.send_signal(signal.SIGINT)
            _, complaints = process.communicate(timeout=60)
            assert "Traceback" not in complaints, complaints


def refused(*options, **variables):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ONCEKEY_")} | variables
    done = subprocess.run(
        [*COMMAND, *options], capture_output=True, text=True, check=False, timeout=60, env=environment
    )
    assert done.returncode == 2, done
    (line,) = done.stderr.splitlines()
    return line


def entered(address, token):
    """The overview, for whoever has the token."""
    with httpx.Client(base_url=address, follow_redirects=True, timeout=60, verify=False) as client:
        return client.post("/login", data={"token": token})


def test_one_command_prints_a_link_that_logs_in(store):
    with running("--store", store, "--port", "0", "--as", "ann") as line:
        said = re.fullmatch(r"oncekey console: (http://127\.0\.0\.1:\d+)/login#([\w-]+)\n", line)
        page = entered(said[1], said[2])
        assert page.status_code == 200
        assert "need attention" in page.text
        assert entered(said[1], "wrong" * 5).status_code == 401


def test_tokens_come_from_a_file_or_the_environment(store, tmp_path):
    lines = f"# who\nann:operate:{ANN}\n"
    file = tmp_path / "tokens"
    file.write_text(lines)
    for options, variables in (
        (("--tokens", str(file)), {}),
        ((), {"ONCEKEY_CONSOLE_TOKENS": f"ann:operate:{ANN}"}),
    ):
        with running("--store", store, "--port", "0", *options, **variables) as line:
            address = line.split()[-1]
            assert ANN not in line
            assert entered(address, ANN).status_code == 200
        with running("--store", store, "--port", "0", "--as", "bob", *options, **variables) as line:
            address, made = line.split()[-1].split("/login#")
            assert [entered(address, token).status_code for token in (made, ANN)] == [200, 200]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ((), "no operator could log in: pass --as NAME"),
        (("--as", "ann", "--host", "0.0.0.0"), "other machines can reach 0.0.0.0"),
        (("--as", "ann", "--host", "::"), "other machines can reach ::"),
        (("--as", "ann", "--role", "god"), "--role is read or operate"),
        (("--as", " "), "without a name"),
        (("--tokens", "/no/such/file"), "cannot be read"),
    ],
)
def test_console_option_error_is_one_line(store, options, why):
    assert why in refused("--store", store, "--port", str(free_port()), *options)


def test_console_command_rejects_a_missing_or_unsupported_store(tmp_path):
    assert "does not exist" in refused("--store", f"sqlite:///{tmp_path / 'none.db'}", "--as", "ann")
    assert not (tmp_path / "none.db").exists()
    assert "this store does not support operator commands" in refused("--store", "memory:", "--as", "ann")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.9.9.9"])
def test_loopback_host_needs_no_public_flag(host):
    check_host(host, public=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "shop.example", ""])
def test_other_hosts_require_the_public_flag(host):
    check_host(host, public=True)
    with pytest.raises(ConfigurationError, match="--public"):
        check_host(host, public=False)


def test_a_missing_extra_is_a_line_that_installs_it(tmp_path):
    for package in ("jinja2", "starlette"):
        program = (
            "import sys\n"
            "class Without:\n"
            "    def find_spec(self, name, path=None, target=None):\n"
            f"        if name.partition('.')[0] == {package!r}: raise ModuleNotFoundError(name)\n"
            "import importlib.util as u; real = u.find_spec\n"
            f"u.find_spec = lambda name, *rest: None if name == {package!r} else real(name, *rest)\n"
            "sys.meta_path.insert(0, Without())\n"
            "from oncekey.cli import main; main()\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, "console", "--store", "memory:", "--as", "ann"],
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert done.stderr == f"oncekey: the console needs {package}: pip install 'oncekey[console]'\n"
        assert done.returncode == 2


def test_demo_prints_a_console_link_and_its_ledger_matches(tmp_path):
    with Demo(tmp_path) as demo:
        (line,) = [one for one in demo.output.splitlines() if one.startswith("Operators' console: ")]
        address, _, token = line.removeprefix("Operators' console: ").partition("/login#")
        assert address == f"{demo.url}/console"
        assert demo.post("/payments", "console-payment-0001").status_code == 201
        with httpx.Client(base_url=f"{address}/", follow_redirects=True, timeout=60, verify=False) as client:
            page = client.post("login", data={"token": token})
            assert page.status_code == 200
            assert "alive" in page.text
            proof = re.search(r'name="proof" value="([0-9a-f]+)"', page.text)[1]
            found = client.post("find", data={"proof": proof, "key": "console-payment-0001"})
            assert "Done: it succeeded (201)." in found.text
            books = client.post("ledger", data={"proof": proof, "span": "1h"})
            assert "No differences" in books.text, books.text
            assert client.post("ledger", data={"proof": proof, "span": "soon"}).status_code == 400
        # The shop itself is not to be moved by what is said to its console.
        assert demo.order("console-order-0001").status_code == 201
