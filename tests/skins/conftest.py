"""The order of the suite: all tests of one stage together, so that its server is started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.provider import Provider
from skins.rows import SKINS


@pytest.fixture(scope="module")
def provider(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Provider]:
    with Provider(tmp_path_factory.mktemp("provider")) as provider:
        yield provider


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of the suite in the order of the skins; all others stay where they are."""
    places = [at for at, item in enumerate(items) if _stage(item) is not None]
    ordered = sorted((items[at] for at in places), key=lambda item: _stage(item) or (0, ""))
    for at, item in zip(places, ordered, strict=True):
        items[at] = item


def _stage(item: pytest.Item) -> tuple[int, str] | None:
    callspec = getattr(item, "callspec", None)
    chosen = None if callspec is None or item.module.__name__ != "skins.test_skins" else callspec.params.get("stage")
    return None if chosen is None else (list(SKINS).index(chosen[0]), chosen[1])
