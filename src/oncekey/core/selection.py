"""Which fields of a body count for the fingerprint, and which may differ between two tries of one request."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final, TypeAlias

from oncekey.core.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Path: TypeAlias = tuple[str, ...]

_BAD_ESCAPE: Final = re.compile(r"~(?![01])")


@dataclass(frozen=True, slots=True)
class Selection:
    """The fields that count, or the fields that do not; nothing given means that everything counts.

    A field is a top-level name (`amount`) or, when it begins with a slash, a JSON pointer of RFC 6901
    (`/customer/id`, `/items/0/sku`). In forms and in multipart bodies it is the name of a field. A body that
    has none of the included fields counts as a whole, so that unlike bodies never share an empty selection;
    so does a body without fields, such as an image.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.include and self.exclude:
            raise ConfigurationError(
                "A selection has include and exclude at once; give the fields that count or those that don't."
            )
        _require_fields(self.include, "include")
        _require_fields(self.exclude, "exclude")

    def __bool__(self) -> bool:
        return bool(self.include or self.exclude)

    def included(self, value: object) -> dict[str, object]:
        """The included fields that a parsed JSON value has, by their pointers."""
        found: dict[str, object] = {}
        for field in self.include:
            _find(value, path_of(field), found)
        return found

    def rest(self, value: object) -> object:
        """A parsed JSON value without the excluded fields."""
        return _without(value, [path_of(field) for field in self.exclude]) if self.exclude else value

    def of_names(self, names: Sequence[str]) -> list[int]:
        """The positions in `names` of the form fields that count."""
        everything = range(len(names))
        if self.include:
            wanted = {path_of(field) for field in self.include}
            return [at for at in everything if (names[at],) in wanted] or list(everything)
        unwanted = {path_of(field) for field in self.exclude}
        return [at for at in everything if (names[at],) not in unwanted]


@lru_cache(maxsize=1024)
def path_of(field: str) -> Path:
    """The steps from the top of a body to `field`."""
    if not field.startswith("/"):
        return (field,)
    return tuple(step.replace("~1", "/").replace("~0", "~") for step in field[1:].split("/"))


def _require_fields(fields: Iterable[object], where: str) -> None:
    if not isinstance(fields, tuple) or not all(isinstance(field, str) and field for field in fields):
        raise ConfigurationError(
            f"{where} of a selection is not a tuple of field names; write {where}=('amount', '/customer/id')."
        )
    for field in fields:
        if field.startswith("/") and _BAD_ESCAPE.search(field):
            raise ConfigurationError(
                f"{field!r} in {where} is not a JSON pointer: only 0 (for ~) and 1 (for /) may follow a ~."
            )


def _find(value: object, path: Path, found: dict[str, object]) -> None:
    for step in path:
        match value:
            case dict() if step in value:
                value = value[step]
            case list() if step in (indices := _indices(value)):
                value = value[indices[step]]
            case _:
                return
    found["".join(f"/{step.replace('~', '~0').replace('/', '~1')}" for step in path)] = value


def _without(value: object, paths: Sequence[Path]) -> object:
    gone = {path[0] for path in paths if len(path) == 1}
    deeper: dict[str, list[Path]] = {}
    for path in paths:
        if len(path) > 1:
            deeper.setdefault(path[0], []).append(path[1:])
    match value:
        case dict():
            return {
                name: _without(member, deeper.get(name, ())) if name in deeper else member
                for name, member in value.items()
                if name not in gone
            }
        case list():
            return [
                _without(value[index], deeper.get(step, ())) if step in deeper else value[index]
                for step, index in _indices(value).items()
                if step not in gone
            ]
        case _:
            return value


def _indices(items: Sequence[object]) -> dict[str, int]:
    """The only spellings of indices that RFC 6901 allows: no sign, no leading zero."""
    return {str(index): index for index in range(len(items))}
