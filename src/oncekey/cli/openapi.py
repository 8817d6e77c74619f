"""`oncekey openapi`: an OpenAPI document that says what keys protect."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from oncekey.cli.printing import plain
from oncekey.cli.routes import App, applications
from oncekey.core.errors import ConfigurationError

NO_DOCUMENT: Final = "--app {app} makes no OpenAPI document of its own: name the FILE that has one"
NO_YAML: Final = "{file} is YAML, which one more package reads: pip install pyyaml; or convert it to JSON"
LEFT: Final = 1


def register(app: typer.Typer) -> None:
    """Add the command `openapi`."""
    app.command("openapi")(openapi)


def openapi(
    file: Annotated[
        Path | None, typer.Argument(help="A document of OpenAPI 3.0 or 3.1, JSON or YAML.", metavar="[FILE]")
    ] = None,
    *,
    app: App,
) -> None:
    """Print an OpenAPI document as JSON in which every protected operation has its header, refusals and answers.

    The document is the application's own, as FastAPI makes one, or FILE. Operations are found by method and path,
    whatever the parts of the path are called, with or without the path of a server. Nothing is taken away.
    Exit code: 0 every protected route is described; 1 the document lacks some, which are named; 2 a mistake.
    """
    from oncekey.frameworks.listing import listed
    from oncekey.frameworks.openapi import transformed

    _, apps = applications(app)
    document = _own(apps, app) if file is None else _read(file)
    made, missing = transformed(document, [route for one in apps for route in listed(one) or ()])
    typer.echo(json.dumps(made, indent=2, ensure_ascii=False))
    for name in missing:
        typer.echo(f"oncekey: {plain(name)} is protected, and the document does not have it", err=True)
    if missing:
        raise typer.Exit(LEFT)


def _own(apps: list[Any], app: str) -> dict[str, Any]:
    for one in apps:
        if callable(getattr(one, "openapi", None)):
            found: dict[str, Any] = one.openapi()
            return found
    raise ConfigurationError(NO_DOCUMENT.format(app=app))


def _read(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        found = _yaml(file, text) if file.suffix in {".yaml", ".yml"} else json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigurationError(f"{file} is no OpenAPI document")
    return found


def _yaml(file: Path, text: str) -> Any:
    try:
        yaml: Any = import_module("yaml")
    except ImportError:
        raise ConfigurationError(NO_YAML.format(file=file)) from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
