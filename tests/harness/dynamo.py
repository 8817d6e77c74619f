"""Two emulators of DynamoDB on loopback, moto's server and dynalite. Neither is the service, and they lie apart."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config

from harness.brokers import BrokerMissingError, Server

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "nobody",
    "AWS_SECRET_ACCESS_KEY": "nothing",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}
"""What a process that talks to an emulator has in its environment: the SDK looks for credentials nowhere else."""


def everything(client: Any, table: str) -> list[dict[str, Any]]:
    """All items of a table: a scan ends after a megabyte."""
    pages = client.get_paginator("scan").paginate(TableName=table, ConsistentRead=True)
    return [item for page in pages for item in page["Items"]]


class Dynamo(Server):
    """An emulator; use it as a context manager."""

    asks = b"GET / HTTP/1.0\r\n\r\n"
    answers = b"HTTP/1."
    transacts = True
    """Whether it knows TransactWriteItems, time to live and backups."""

    @property
    def endpoint(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.port}"

    def url(self, table: str, port: int | None = None) -> str:
        """A store's URL."""
        return f"dynamodb://us-east-1/{table}?endpoint=http://127.0.0.1:{port or self.port}"

    def client(self) -> Any:
        """A client of the application's own."""
        session = boto3.session.Session(
            aws_access_key_id="nobody", aws_secret_access_key="nothing", region_name="us-east-1"
        )
        return session.client("dynamodb", endpoint_url=self.endpoint, config=Config(retries={"total_max_attempts": 1}))


# As `moto_server` runs it, two threads can find the same condition true: of three processes that claimed a key at once,
# two won in 2 of 30 rounds. One request after the other is what the service promises for one item. A third of each
# request went into finding out which service it is for and which methods that has: both are known before the first one.
_ONE_BY_ONE = """
import functools, sys, threading
from moto.core import responses
from moto.server import create_backend_app
from werkzeug.serving import WSGIRequestHandler, run_simple
WSGIRequestHandler.log_request = lambda *_, **__: None
responses.method_names_from_class = functools.cache(responses.method_names_from_class)
moto, turn = create_backend_app("dynamodb"), threading.Lock()
def one_by_one(environ, start_response):
    with turn:
        return moto(environ, start_response)
run_simple("127.0.0.1", int(sys.argv[1]), one_by_one, threaded=True)
"""


class Moto(Dynamo):
    """moto's server, which the development requirements bring; it does one request after the other."""

    def command(self) -> list[str]:
        """How it is started."""
        return [sys.executable, "-c", _ONE_BY_ONE, str(self.port)]


class Dynalite(Dynamo):
    """dynalite, which `make dynalite` puts beside the interpreter."""

    variable = "ONCEKEY_TEST_DYNALITE"
    transacts = False

    def command(self) -> list[str]:
        """The program that was named, the one of `make dynalite`, or an installed one."""
        beside = Path(sys.executable).parent.parent / "dynalite" / "node_modules" / ".bin" / "dynalite"
        named = os.environ.get(self.variable) or (str(beside) if beside.exists() else shutil.which("dynalite"))
        if not named:
            raise BrokerMissingError(
                f"No dynalite was found: run `make dynalite`, which needs npm, or set {self.variable} to the program."
            )
        return [named, "--host", "127.0.0.1", "--port", str(self.port), "--createTableMs", "0", "--deleteTableMs", "0"]
