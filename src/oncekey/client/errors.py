"""The exceptions of the client, for operations without a plain answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oncekey.core.errors import OncekeyError

if TYPE_CHECKING:
    from oncekey.client.exchange import Call, Reply


class ClientError(OncekeyError):
    """Everything that oncekey's client raises."""


class KeyReusedError(ClientError):
    """The key belongs to another request: a bug of the calling program, which no retry repairs."""

    def __init__(self, message: str, *, key: str, reply: Reply | None = None) -> None:
        super().__init__(message)
        self.key = key
        self.reply = reply


class OutcomeUnknownError(ClientError):
    """The operation may have happened, and no answer says so. Do not send it with a new key.

    `call` and `key` are needed to ask again: pass the error to the transport's `ask_again`. `reply` is the last
    answer, if there was one.
    """

    def __init__(self, message: str, *, call: Call, key: str, reply: Reply | None = None) -> None:
        super().__init__(message)
        self.call = call
        self.key = key
        self.reply = reply


class KeyExpiredError(OutcomeUnknownError):
    """The key is too old to be sent: find out by other means whether it happened, then use a new key if not."""


class JournalError(ClientError):
    """The journal cannot be used, so nothing was sent."""


class PersonalKeyWarning(UserWarning):
    """A key that the caller chose looks like an e-mail address or a telephone number; keys end up in logs."""
