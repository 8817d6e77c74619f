"""`oncekey provider`: the simulated payment provider of the demo, as a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from oncekey.core.errors import OncekeyError

DEFAULT_LEDGER = "oncekey-demo-provider.db"
DEFAULT_PORT = 8001
DEFAULT_SECRET = "whsec_demo_of_oncekey"  # noqa: S105  (a demo's)


def register(app: typer.Typer) -> None:
    """Add the command `provider`."""
    app.command("provider")(provider)


def provider(  # noqa: PLR0917  (typer reads the parameters)
    ledger: Annotated[Path, typer.Option(help="The SQLite file with one row per charge.")] = Path(DEFAULT_LEDGER),
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="The port to listen on; 0 takes a free one.")
    ] = DEFAULT_PORT,
    webhooks: Annotated[
        str | None, typer.Option(help="Where to send word of each charge: http://127.0.0.1:8000/…", metavar="URL")
    ] = None,
    secret: Annotated[str, typer.Option(help="What webhooks are signed with.")] = DEFAULT_SECRET,
    until_eof: Annotated[bool, typer.Option("--until-eof", help="End when standard input ends.", hidden=True)] = False,
) -> None:
    """Serve a simulated payment provider that can fail in any way, by name."""
    try:
        from oncekey.demo.provider_server import serve
    except ImportError as error:
        _fail(f"the provider needs {error.name}: pip install 'oncekey[demo]'")
    try:
        serve(
            ledger,
            host=host,
            port=port,
            webhooks=webhooks,
            secret=secret,
            until_eof=until_eof,
            announce=lambda url: print(f"oncekey provider: {url} keeps its charges in {ledger}", flush=True),
        )
    except OncekeyError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        print()


def _fail(sentence: str) -> NoReturn:
    print(f"oncekey provider: {sentence}", file=sys.stderr)
    raise typer.Exit(1)
