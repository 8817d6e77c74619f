"""`oncekey console`: serves the operators' console on this machine."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Annotated, Final

import typer

from oncekey.cli import options
from oncekey.core.errors import ConfigurationError
from oncekey.sealing import from_environment

TOKENS: Final = "ONCEKEY_CONSOLE_TOKENS"
SECRET: Final = "ONCEKEY_CONSOLE_SECRET"  # noqa: S105  (the name of a variable, not a secret)
NOBODY: Final = (
    "no operator could log in: say --as NAME for a token that lasts as long as this command, --tokens FILE with lines "
    f"of NAME:ROLE:TOKEN, or put those into {TOKENS}"
)


def register(app: typer.Typer) -> None:
    """Add the command `console`."""
    app.command("console")(console)


def console(
    store: options.StoreUrl,
    *,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port to listen on; 0 takes a free one.")] = 8002,
    name: Annotated[
        str | None,
        typer.Option("--as", help="Make a token for NAME that lasts as long as this command.", metavar="NAME"),
    ] = None,
    role: Annotated[str, typer.Option(help="With --as: operate, or read.")] = "operate",
    tokens: Annotated[
        Path | None, typer.Option(help=f"Lines of NAME:ROLE:TOKEN; else {TOKENS} has them.", metavar="FILE")
    ] = None,
    namespace: options.Namespace = None,
    trace_url: Annotated[
        str | None,
        typer.Option(
            "--trace-url", envvar="ONCEKEY_TRACE_URL", metavar="URL", help="The address of a trace: .../{trace}."
        ),
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="Let other machines reach it; put TLS before it.")] = False,
) -> None:
    """Serve the operators' console: what waits, what happened to a key, and what to do about it.

    It does not start without a token. Tokens come from a file or from ONCEKEY_CONSOLE_TOKENS, never from the command
    line, which others see; `--as NAME` makes one that lasts as long as this command, and prints the link. ROLE is
    `read` or `operate`. Several processes that serve one console share ONCEKEY_CONSOLE_SECRET, which signs sessions.

    Without --public the command refuses an address that other machines can reach.
    """
    from oncekey.console import Console, Operator, Role, Tokens
    from oncekey.console.serving import serve

    made = secrets.token_urlsafe(24)
    if name is not None:
        if role not in set(Role):
            raise ConfigurationError(f"--role is {' or '.join(Role)}")
        known = Tokens([(made, Operator(name.strip(), Role(role)))])
    else:
        known = Tokens.read(_given(tokens))
    secret = os.environ.get(SECRET)
    pages = Console(
        store,
        tokens=known,
        secret=secret.encode() if secret else None,
        public=public,
        namespace=namespace,
        trace_url=trace_url,
        seal=from_environment(),
    )
    options.check_exists(store)

    def announce(address: str) -> None:
        link = f"{address}/login#{made}" if name is not None else address
        typer.echo(f"oncekey console: {link}")
        typer.echo("Ctrl-C ends it." + (f" The link logs {name} in." if name is not None else ""))

    serve(pages, host=host, port=port, public=public, announce=announce)


def _given(file: Path | None) -> str:
    if file is None:
        text = os.environ.get(TOKENS, "")
        if not text.strip():
            raise ConfigurationError(NOBODY)
        return text
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"--tokens {file} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from None
