"""What a person sees in a browser: the page that sends requests, and the one that explains refusals."""

from __future__ import annotations

from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Final

from fastapi import APIRouter
from starlette.responses import Response

from oncekey.core.problems import PROBLEMS

if TYPE_CHECKING:
    from oncekey.core.choices import Flavor
    from oncekey.core.policy import Policy

_MEDIA_TYPES: Final = {
    "index.html": "text/html",
    "problems.html": "text/html",
    "demo.css": "text/css",
    "demo.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}
_HEADERS: Final = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_LIST: Final = "<!-- problems -->"


def page_routes(policy: Policy) -> APIRouter:
    """The pages and what they load; everything comes from the package and nothing from elsewhere."""
    router = APIRouter(include_in_schema=False)
    _serve(router, "/", "index.html", _text("index.html"))
    for name in ("demo.css", "demo.js", "icon.svg"):
        _serve(router, f"/{name}", name, _text(name))
    if policy.docs_url.startswith("/"):
        text = _text("problems.html").replace(_LIST, _problems(policy.flavor))
        _serve(router, policy.docs_url, "problems.html", text)
    return router


def _serve(router: APIRouter, path: str, name: str, text: str) -> None:
    content = text.encode()

    async def page() -> Response:
        return Response(content, media_type=_MEDIA_TYPES[name], headers=_HEADERS)

    router.add_api_route(path, page, methods=["GET", "HEAD"])


def _text(name: str) -> str:
    return files(__package__).joinpath("page", name).read_text("utf-8")


def _problems(flavor: Flavor) -> str:
    """A card for each problem; the ids are what the `Link` of a refusal points to."""
    return "\n".join(
        f'<article class="card problem" id="{escape(problem.slug)}">'
        f"<h2>{problem.status_in(flavor)} {escape(problem.title)}</h2>"
        f"<p><code>{escape(code.value)}</code></p><p>{escape(problem.detail)}</p></article>"
        for code, problem in PROBLEMS.items()
    )
