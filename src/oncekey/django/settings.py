"""`settings.ONCEKEY`: where the project's `Once` is, as `"shop.once.once"`; `ONCEKEY_DATABASE`: where its keys are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from django.conf import settings
from django.utils.module_loading import import_string

from oncekey.core.errors import ConfigurationError

if TYPE_CHECKING:
    from oncekey.django.once import Once

SETTING: Final = "ONCEKEY"
NOT_SET: Final = 'settings.ONCEKEY is missing: say where the project\'s Once is, as in ONCEKEY = "shop.once.once"'
NOT_THERE: Final = "settings.ONCEKEY = {place!r}: {why}"
NOT_DJANGOS: Final = "that is a {kind}, and an oncekey.django.Once is needed"


def alias_of_project() -> str:
    """The database that keys are kept in, as `settings.ONCEKEY_DATABASE` says."""
    alias: str = getattr(settings, "ONCEKEY_DATABASE", "default")
    return alias


def place_of_once() -> str:
    """What the setting says."""
    place = getattr(settings, SETTING, None)
    if not isinstance(place, str) or "." not in place:
        raise ConfigurationError(NOT_SET)
    return place


def once_of_project() -> Once:
    """The project's `Once`, or one line about what is wrong with the setting."""
    from oncekey.django.once import Once  # noqa: PLC0415  (it is imported by those who are imported by it)

    place = place_of_once()
    try:
        found = import_string(place)
    except ImportError as error:
        raise ConfigurationError(NOT_THERE.format(place=place, why=error)) from error
    if not isinstance(found, Once):
        raise ConfigurationError(NOT_THERE.format(place=place, why=NOT_DJANGOS.format(kind=type(found).__name__)))
    return found
