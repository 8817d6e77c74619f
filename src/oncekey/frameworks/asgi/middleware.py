"""The middleware: plain ASGI, innermost, and out of the way of every request that has no key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oncekey.core.answers import refuse
from oncekey.core.errors import LeaseLostError, NotExecuted, StoppingError
from oncekey.core.model import Code, Refuse
from oncekey.frameworks.asgi.delivery import send_answer
from oncekey.frameworks.asgi.exchange import Exchange, Phase, UnsettledError, Visit, current
from oncekey.frameworks.asgi.intake import ClientLeftError, TooSlowError
from oncekey.frameworks.asgi.lending import take_back

if TYPE_CHECKING:
    from oncekey.frameworks.asgi.enrolment import Enrolment
    from oncekey.frameworks.asgi.installation import Installation
    from oncekey.frameworks.asgi.types import App, Receive, Scope, Send

KEY_FIELD = b"idempotency-key"
# They would send a file's name, or hold back the end of a response: then there were no bytes to store.
WITHHELD_EXTENSIONS = ("http.response.pathsend", "http.response.zerocopysend", "http.response.trailers")


class IncompleteError(Exception):
    """The application returned without finishing its response."""


class OncekeyMiddleware:
    """Captures the answers of keyed requests, settles them, and only then sends them."""

    def __init__(self, app: App, installation: Installation) -> None:
        self.app = app
        self.installation = installation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http" or "oncekey" in scope:
            await self.app(scope, receive, send)
            return
        enrolment = self.installation.patterns.find(scope["method"], scope["path"])
        # On other methods a key has no effect, whatever it looks like (R14).
        keyed = scope["method"] in self.installation.methods
        lines = [bytes(value) for name, value in scope["headers"] if name == KEY_FIELD] if keyed else []
        if not lines:
            await self._visit(scope, receive, send, enrolment)
            return
        await self._exchange(Exchange(self.installation, scope, receive, send, lines), enrolment)

    async def _visit(self, scope: Scope, receive: Receive, send: Send, enrolment: Enrolment | None) -> None:
        if enrolment is not None and enrolment.policy.require_key:
            await send_answer(send, refuse(Refuse(Code.KEY_MISSING), enrolment.policy))
            return
        visit = Visit(self.installation, scope, receive)
        token = current.set(visit)
        try:
            await self.app(scope, visit.receive, send)
        except ClientLeftError:
            pass
        except TooSlowError:
            await send_answer(send, refuse(Refuse(Code.BODY_TOO_SLOW), self.installation.policy))
        finally:
            current.reset(token)
            await take_back(visit)

    async def _exchange(self, exchange: Exchange, enrolment: Enrolment | None) -> None:
        scope = exchange.scope
        scope["oncekey"] = exchange  # a sub-application with an installation of its own sees it, and passes
        if scope.get("extensions"):
            kept = {name: about for name, about in scope["extensions"].items() if name not in WITHHELD_EXTENSIONS}
            scope["extensions"] = kept
        token = current.set(exchange)
        try:
            if enrolment is not None:
                await self._enter(exchange, enrolment)
            if exchange.phase is Phase.ANSWERED:
                await exchange.send({"type": "http.response.body"})
            else:
                await self.app(scope, exchange.receive, exchange.send)
        except (UnsettledError, ClientLeftError):
            pass
        except BaseException as error:
            if exchange.phase is not Phase.RUNNING:
                if await exchange.turn_away(error):
                    return
                raise
            # What a handler says to us is not a fault that the server has to hear of.
            if not await exchange.finish(error) or not isinstance(error, NotExecuted | LeaseLostError | StoppingError):
                raise
        else:
            if exchange.phase is Phase.RUNNING:
                await exchange.finish(IncompleteError())
        finally:
            current.reset(token)
            await exchange.close()

    @staticmethod
    async def _enter(exchange: Exchange, enrolment: Enrolment) -> None:
        """Claim before the application runs: where it starts to execute cannot be seen, so it has from here on."""
        await exchange.claim(enrolment)
        exchange.entered = True
