"""The asyncio runtime of a request that was lent sessions or connections, which follow it through its transactions.

While a phase runs, everything that was lent is the phase's own transaction. It joins before the application's code is
called, nothing more is taken once it was flushed, and it parts only when the transaction is over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from oncekey.engine.effects import Call, Commit, Flush, Rest, Rollback, TakeBack
from oncekey.frameworks.asgi.lending import lend, take_back
from oncekey.runtimes.aio import AsyncRuntime

if TYPE_CHECKING:
    from oncekey.engine.effects import Effect
    from oncekey.engine.shell import AsyncEngine
    from oncekey.frameworks.asgi.lending import Borrower
    from oncekey.frameworks.asgi.loans import Loan
    from oncekey.runtimes.aio import Drain


class LendingRuntime(AsyncRuntime):
    """Performs the flows of one request."""

    def __init__(self, engine: AsyncEngine, drain: Drain, request: Borrower) -> None:
        super().__init__(engine, drain)
        self._request = request
        self._loan: Loan | None = None

    async def perform(self, effect: Effect) -> Any:  # noqa: ANN401  (what the effect promises)
        """Perform one effect, and do with what was lent as it says."""
        match effect:
            case Rest():
                if self._request.lent is not None:
                    await self._request.lent.rest()
            case TakeBack():
                await take_back(self._request)
            case Call(within=tx) if tx is not None:
                self._loan = lend(self._request).joined(tx)
                return await super().perform(effect)
            case Flush():
                await super().perform(effect)
                if self._loan is not None:
                    self._loan.done()
            case Commit():
                ended = await super().perform(effect)
                self._part()
                return ended
            case Rollback():
                try:
                    await super().perform(effect)
                finally:
                    self._part()
            case _:
                return await super().perform(effect)
        return None

    def _part(self) -> None:
        loan, self._loan = self._loan, None
        if loan is not None:
            loan.part()
