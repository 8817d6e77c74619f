"""Counts the calls that one piece of work makes into oncekey: what a budget of calls is held against.

    with counted() as calls:
        await caller.run()
    assert calls.entries <= 150, calls.report()

A call is an entry into a Python function, comprehension, generator or coroutine whose code lies in the package, whoever
called it. The first entry of a generator or a coroutine is one call; each time that it goes on after a `yield` or an
`await` is a resumption and counted apart, because a round trip to the database goes on with every frame that waits for
it. What is written in C, and what the standard library or a framework does, is not counted. A function that the
interpreter makes out of text, such as a dataclass's `__init__`, has no file and is not counted either.

The interpreter's profile hook is used, so a profiler or another count cannot run at the same time in this thread. Other
threads are counted where they are started inside of the block.
"""

from __future__ import annotations

import dis
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import oncekey

PACKAGE: Final = str(Path(oncekey.__file__).parent) + "/"
_SUSPENDS: Final = CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR


@dataclass
class Calls:
    """What was counted, by function: module and qualified name."""

    first: Counter[str] = field(default_factory=Counter)
    resumed: Counter[str] = field(default_factory=Counter)

    @property
    def entries(self) -> int:
        """How many times a function was entered from its beginning."""
        return self.first.total()

    @property
    def resumptions(self) -> int:
        """How many times a generator or a coroutine went on."""
        return self.resumed.total()

    @property
    def all(self) -> int:
        """Both."""
        return self.entries + self.resumptions

    def report(self, most: int = 60) -> str:
        """The functions with the most calls first, for the message of a failed budget."""
        lines = [f"{self.entries} calls and {self.resumptions} resumptions"]
        for name in sorted(self.first | self.resumed, key=lambda one: (-self.first[one] - self.resumed[one], one))[
            :most
        ]:
            lines.append(f"{self.first[name]:4} {self.resumed[name]:+4}  {name}")
        return "\n".join(lines)


@contextmanager
def counted(package: str = PACKAGE) -> Iterator[Calls]:
    """Count until the block ends. `package` is the beginning of the paths of the files that count."""
    if sys.getprofile() is not None:
        raise RuntimeError("somebody else is profiling this thread, so calls cannot be counted")
    calls, names = Calls(), dict[CodeType, str]()

    def hook(frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        name = names.get(code)
        if name is None:
            name = names[code] = _name_of(code, package)
        if name:
            (calls.resumed if _goes_on(frame) else calls.first)[name] += 1

    threading.setprofile(hook)
    sys.setprofile(hook)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def _name_of(code: CodeType, package: str) -> str:
    """How a report names a function; empty for one that is not counted."""
    if not code.co_filename.startswith(package):
        return ""
    return f"{code.co_filename.removeprefix(package)}:{code.co_qualname}"


def _goes_on(frame: FrameType) -> bool:
    """Whether the frame has run before: then it stands farther on than at the mark where its code begins."""
    code = frame.f_code
    return bool(code.co_flags & _SUSPENDS) and frame.f_lasti > _beginning_of(code)


@lru_cache(maxsize=4096)
def _beginning_of(code: CodeType) -> int:
    """The place of the first RESUME, which the compiler puts where a function begins and after every `yield`."""
    return next(one.offset for one in dis.get_instructions(code) if one.opname == "RESUME")
