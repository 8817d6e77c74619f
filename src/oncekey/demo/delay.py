"""`X-Demo-Delay: seconds`: makes a handler slow, so that a person can watch two requests meet."""

from __future__ import annotations

import math
from http import HTTPStatus
from typing import Annotated, Final

from fastapi import Depends, Header

from oncekey.demo.problems import ProblemError

LONGEST_DELAY: Final = 60.0


async def wanted_delay(
    x_demo_delay: Annotated[str, Header(description="Makes the handler slow: seconds, 0 to 60.")] = "0",
) -> float:
    """The seconds asked for."""
    try:
        seconds = float(x_demo_delay)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= LONGEST_DELAY:
        detail = f"X-Demo-Delay is a number of seconds from 0 to {LONGEST_DELAY:g}."
        raise ProblemError(HTTPStatus.BAD_REQUEST, "invalid_delay", detail)
    return seconds


Delay = Annotated[float, Depends(wanted_delay)]
