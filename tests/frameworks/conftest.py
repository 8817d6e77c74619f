"""What every exchange of these tests is asked at its end: that nothing of its flow is left."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from oncekey.frameworks.asgi.middleware import Exchange


@pytest.fixture(autouse=True)
def flows(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A flow that is left at its handler owns a claim, and perhaps a transaction: every way out has to resume it.

    Asked when an exchange was closed, so also after errors, disconnects and cancellations. Two exchanges of one test
    are told apart by their keys.
    """
    left: list[str] = []
    close = Exchange.close

    async def watched(self: Exchange) -> None:
        await close(self)
        flow = self._flow
        if flow is not None and flow.gi_frame is not None:
            left.append(f"{self.scope.get('method')} {self.scope.get('path')}: its flow is not over")

    monkeypatch.setattr(Exchange, "close", watched)
    yield left
    assert not left
