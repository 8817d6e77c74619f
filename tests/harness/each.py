"""One test for all cases of a pure function, where `pytest.mark.parametrize` would make an item of each.

pytest takes milliseconds for an item, and a pure function microseconds. A failure carries a note with its case.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any


def each(names: str | tuple[str, ...], values: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test with every value, in one item; two of these above each other run their product."""
    wanted = tuple(name.strip() for name in names.split(",")) if isinstance(names, str) else names
    cases = [value if len(wanted) > 1 else (value,) for value in values]
    if not cases:
        raise ValueError(f"no case for {', '.join(wanted)}: the test could not fail")

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(test)

        @functools.wraps(test)
        def loop(*args: Any, **given: Any) -> None:
            for case in cases:
                chosen = dict(zip(wanted, case, strict=True))
                try:
                    test(*args, **given, **chosen)
                except BaseException as error:  # `pytest.fail` raises no Exception
                    error.add_note(f"with {', '.join(f'{name}={value!r}' for name, value in chosen.items())}")
                    raise

        left = [parameter for name, parameter in signature.parameters.items() if name not in wanted]
        loop.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]  # what pytest looks at
        return loop

    return decorate
