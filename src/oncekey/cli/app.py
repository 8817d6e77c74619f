"""The typer application, made of the modules that register themselves."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from importlib.metadata import version
from typing import Annotated

import typer

from oncekey import cli


def make_app() -> typer.Typer:
    """All commands."""
    app = typer.Typer(
        name="oncekey",
        help="Make state-changing HTTP requests safe to retry.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_options)
    for found in sorted(pkgutil.iter_modules(cli.__path__), key=lambda module: module.name):
        register = getattr(import_module(f"{cli.__name__}.{found.name}"), "register", None)
        if register is not None:
            register(app)
    return app


def _options(
    *,
    show_version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=lambda asked: _version(asked=asked), help="Say which.")
    ] = False,
) -> None:
    """Make state-changing HTTP requests safe to retry."""


def _version(*, asked: bool) -> None:
    if asked:
        typer.echo(f"oncekey {version('oncekey')}")
        raise typer.Exit
