"""What a made-up day draws: names, amounts, spans, and how busy which hour is; all of it from one seed."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from uuid import UUID

from oncekey.core.model import SECOND
from oncekey.demo.models import Item, ordered_uuid
from oncekey.demo.money import Money

if TYPE_CHECKING:
    from oncekey.core.model import Duration, Instant

PRODUCTS: Final = ("sku_teapot", "sku_kettle", "sku_cup", "sku_sencha", "sku_assam", "sku_strainer")
CURRENCIES: Final = {"EUR": 75, "USD": 17, "GBP": 8}
PROCESSES: Final = (88, 91, 107)


@dataclass(slots=True)
class Clock:
    """The instant that the day has come to."""

    now: Instant

    def __call__(self) -> Instant:
        """That instant."""
        return self.now


class Draws:
    """Everything that is left to chance."""

    def __init__(self, seed: int, clock: Clock) -> None:
        self.random = random.Random(seed)  # noqa: S311  (a made-up day needs no secrets)
        self._clock = clock

    def money(self) -> Money:
        """An amount of some customer: many small ones, and a few that are large."""
        amount = round(100 * self.random.lognormvariate(3.4, 0.9)) + 99
        currency = self.random.choices(list(CURRENCIES), list(CURRENCIES.values()))[0]
        return Money(customer_id=self.customer(), amount_cents=amount, currency=currency)

    def customer(self) -> str:
        """One of a few hundred."""
        return f"cus_{self.random.randint(1001, 1400)}"

    def items(self) -> list[Item]:
        """What is ordered."""
        return [
            Item(product_id=self.random.choice(PRODUCTS), quantity=self.random.randint(1, 5))
            for _ in range(self.random.randint(1, 3))
        ]

    def tossed(self) -> bool:
        """One or the other, as a coin falls."""
        return self.random.getrandbits(1) == 1

    def between(self, least: Duration, most: Duration) -> Duration:
        """Any span from the one to the other."""
        return self.random.randrange(least, most)

    def about(self, usual: Duration) -> Duration:
        """A span as programs take it: about so long, and now and then much longer."""
        return round(self.random.lognormvariate(math.log(usual), 0.55))

    def pause(self, attempts: int) -> Duration:
        """Until the next try, after so many."""
        envelope: float = SECOND * 2**attempts
        return round(envelope * self.random.uniform(0.5, 1.0))

    def owner(self, process: str) -> str:
        """A name for one claim of a worker, or of one of the processes that serve."""
        if process == "web":
            process = f"web-{self.random.randint(1, 3)}:{self.random.choice(PROCESSES)}"
        return f"{process}:{self.random.getrandbits(64):016x}"

    def uuid(self) -> UUID:
        """A random one."""
        return UUID(int=self.random.getrandbits(128), version=4)

    def new_id(self) -> UUID:
        """One that grows with time, as the shop's rows have them."""
        return ordered_uuid(self._clock.now * 1000, self.random.getrandbits(62))


def busyness(minute: int) -> float:
    """How much is going on in this minute since the epoch (UTC): little at night, most before and after noon."""
    hour = minute % 1440 / 60
    open_at, shut_at = 5.5, 22.5
    day = max(0.0, math.sin((hour - open_at) / (shut_at - open_at) * math.pi)) if open_at <= hour <= shut_at else 0.0
    lunch = 0.25 * math.exp(-((hour - 12.7) ** 2) / 0.8)
    return 0.12 + day - lunch
