"""Patterns of `install(app, enrol={"POST /legacy/{id}": ...})`: a method, and the template of a path."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from oncekey.core.errors import ConfigurationError

_PARAMETER: Final = re.compile(r"\{(\w+)(:path)?\}")
_SLASHES: Final = re.compile("/{2,}")


@dataclass(frozen=True, slots=True)
class Pattern:
    """A method and a path template, such as `POST /legacy/{id}`."""

    text: str
    method: str
    template: re.Pattern[str]
    spelled: re.Pattern[str]
    """The template for a path in its plain spelling."""

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """Parse `METHOD /path/{name}`; `{name}` is one segment, `{name:path}` the rest."""
        method, _, path = text.partition(" ")
        if not method.isupper() or not path.startswith("/"):
            raise ConfigurationError(f"{text!r} is not an enrolment pattern: write it as 'POST /path/{{name}}'")
        return cls(text, method, _template(path), _template(plain(path), spelled=True))

    @property
    def sample(self) -> str:
        """A path that the pattern matches, and that a route with converters is likely to match."""
        return _PARAMETER.sub("1", self.text.partition(" ")[2])

    def matches(self, method: str, path: str) -> bool:
        """Whether the pattern matches a request."""
        return method == self.method and self.template.fullmatch(path) is not None


def plain(path: str) -> str:
    """A path without the parts that many routers ignore: repeated slashes, a trailing slash and a trailing newline."""
    return _SLASHES.sub("/", path.removesuffix("\n")).rstrip("/") or "/"


@lru_cache(maxsize=256)
def _template(path: str, *, spelled: bool = False) -> re.Pattern[str]:
    parts = _PARAMETER.split(path)
    pattern = "".join(
        re.escape(part or "") if index % 3 == 0 else ("" if index % 3 == 2 else _segment(parts[index + 1]))  # noqa: PLR2004
        for index, part in enumerate(parts)
    )
    if spelled:
        pattern = pattern.replace(f"/{_REST}", "(?:/.*)?")  # the rest may be empty, and then has no slash
    return re.compile(pattern, re.DOTALL)


_REST: Final = ".+"


def _segment(kind: str | None) -> str:
    return _REST if kind == ":path" else "[^/]+"
