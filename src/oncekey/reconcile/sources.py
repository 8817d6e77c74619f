"""Where a provider's books come from: a CSV file, a JSON file, or a URL that answers with JSON."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from oncekey.core.errors import ConfigurationError
from oncekey.reconcile.ledger import LedgerEntry

FIELDS: Final = ("downstream_key", "provider_id", "amount", "currency", "at")
PATIENCE: Final = 60.0
_LARGEST: Final = 512 * 1024 * 1024


def entries(place: str, columns: Mapping[str, str] | None = None) -> Iterator[LedgerEntry]:
    """The charges at a place; `columns` names what a field is called there, if it is called otherwise."""
    names = {**{field: field for field in FIELDS}, **(columns or {})}
    for number, row in enumerate(_rows(place), start=1):
        yield _entry(row, names, f"{place}, entry {number}")


def _rows(place: str) -> Iterable[Mapping[str, Any]]:
    if "://" in place:
        return _listed(_fetched(place), place)
    path = Path(place)
    if not path.is_file():
        raise ConfigurationError(f"there is no ledger {place}")
    if path.suffix.lower() == ".json":
        return _listed(path.read_bytes(), place)
    return _csv(path)


def _csv(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        yield from csv.DictReader(file)


def _fetched(url: str) -> bytes:
    if urlsplit(url).scheme not in {"http", "https"}:
        raise ConfigurationError(f"{url}: a ledger is a file, or an http:// or https:// address")
    try:
        with urlopen(Request(url, headers={"Accept": "application/json"}), timeout=PATIENCE) as reply:  # noqa: S310
            body: bytes = reply.read(_LARGEST)
            return body
    except OSError as error:
        raise ConfigurationError(f"{url} did not show its ledger: {error}") from None


def _listed(body: bytes, place: str) -> list[Mapping[str, Any]]:
    """A list of objects, or an object that holds one such list."""
    try:
        document = json.loads(body, parse_float=Decimal)
    except ValueError:
        raise ConfigurationError(f"{place} holds no JSON") from None
    if isinstance(document, dict):
        lists = [value for value in document.values() if isinstance(value, list)]
        document = lists[0] if len(lists) == 1 else document
    if not isinstance(document, list) or not all(isinstance(one, dict) for one in document):
        raise ConfigurationError(f"{place} holds no list of charges")
    return document


def _entry(row: Mapping[str, Any], names: Mapping[str, str], where: str) -> LedgerEntry:
    given = {field: _text(row.get(name)) for field, name in names.items()}
    if given["downstream_key"] is None and given["provider_id"] is None:
        raise ConfigurationError(
            f"{where} has neither {names['downstream_key']!r} nor {names['provider_id']!r}: "
            "say what they are called with --column FIELD=NAME"
        )
    try:
        amount = None if given["amount"] is None else Decimal(given["amount"])
    except InvalidOperation:
        raise ConfigurationError(f"{where}: {given['amount']!r} is no amount") from None
    return LedgerEntry(given["downstream_key"], given["provider_id"], amount, given["currency"], given["at"])


def _text(value: Any) -> str | None:  # noqa: ANN401  (a cell of whatever kind)
    return None if value is None or value == "" else str(value)
