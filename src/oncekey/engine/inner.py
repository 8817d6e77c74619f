"""Errors that came out of a protected function which was called inside of another operation.

What a handler raises may decide its own outcome: `NotExecutedError` means that nothing was sent, `RejectedError` is a
function's final no. If a protected function that the handler called raised it, it is a statement about that call and
not about the handler, so it proves nothing about the handler.

Each error that leaves a protected function gets the next number of one counter, and each operation notes the number at
which it began. So an error is an inner one if it got its number later; an error object that an application raises
again and again is not mistaken for one.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import count
from typing import Final, TypeVar

E = TypeVar("E", bound=BaseException)

_NUMBERS: Final = count(1)
_LEFT: Final = "__oncekey_left__"


operation_begins: Final = _NUMBERS.__next__
"""Returns the number at which an operation begins."""


def leaving(error: E) -> E:
    """The error, marked as one that leaves a protected function."""
    with suppress(AttributeError, TypeError):  # an exception class may refuse attributes
        setattr(error, _LEFT, next(_NUMBERS))
    return error


def is_inner(error: BaseException, began: int) -> bool:
    """Whether the error left a protected function after the operation began at `began`."""
    number = getattr(error, _LEFT, 0)
    return isinstance(number, int) and number > began
