"""What a person sees in a browser: the page that sends requests and shows what they did."""

from __future__ import annotations

from importlib.resources import files
from typing import Final

from fastapi import APIRouter
from starlette.responses import Response

_MEDIA_TYPES: Final = {
    "index.html": "text/html",
    "demo.css": "text/css",
    "demo.js": "text/javascript",
    "verdict.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}
_HEADERS: Final = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def page_routes() -> APIRouter:
    """The page and what it loads; everything comes from the package and nothing from elsewhere."""
    router = APIRouter(include_in_schema=False)
    for name in _MEDIA_TYPES:
        _serve(router, "/" if name == "index.html" else f"/{name}", name)
    return router


def _serve(router: APIRouter, path: str, name: str) -> None:
    content = files(__package__).joinpath("page", name).read_bytes()

    async def page() -> Response:
        return Response(content, media_type=_MEDIA_TYPES[name], headers=_HEADERS)

    router.add_api_route(path, page, methods=["GET", "HEAD"])
