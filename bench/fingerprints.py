"""`python -m bench.fingerprints`: the processor time of a body's canonical form, compared with that of `json.loads`.

The bodies are ordinary ones and the slowest known ones. Each is measured several times, and the best time counts,
because other load only adds to it. A refused body is measured until its refusal.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable

from bench.places import ROOT


def filled(size: int, make: Callable[[random.Random], str], first: str = "") -> bytes:
    """An array of about `size` bytes."""
    draw, items, length = random.Random(8785), [first] if first else [], 0
    while length < size:
        items.append(make(draw))
        length += len(items[-1]) + 1
    return f"[{','.join(items)}]".encode()


def order(draw: random.Random) -> str:
    """An element of an ordinary body."""
    return json.dumps({"id": draw.randrange(10**6), "amount": draw.randrange(10**6) / 100, "name": "Zoë"})


def bodies(size: int) -> dict[str, bytes]:
    """The bodies, by name."""
    return {
        "orders": filled(size, order),
        "integers": filled(size, lambda draw: str(draw.randrange(1000))),
        "doubles of 17 digits": filled(size, lambda draw: repr(draw.random())),
        "exponents": filled(size, lambda _: "1e-9"),
        "many exponents": filled(size, lambda draw: f"{draw.randrange(1, 999)}e-{draw.randrange(10, 99)}"),
        "exponents, an escape": filled(size, lambda _: "1e21", '"\\u0041"'),
        "exponents, an emoji": filled(size, lambda _: "1e21", '"\U0001f600"'),
        "integers, an emoji": filled(size, lambda _: "1", '"\U0001f600"'),
        "20 digits": filled(size, lambda draw: f"0.{draw.randrange(10**20, 10**21)}"),
        "too small for a double": filled(size, lambda draw: f"{draw.randrange(1, 9)}e-4{draw.randrange(10, 99)}"),
    }


def milliseconds(work: Callable[[], object], rounds: int) -> float:
    """The best time of several rounds."""
    found = []
    for _ in range(rounds):
        began = time.process_time()
        work()
        found.append(time.process_time() - began)
    return min(found) * 1000


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(prog="bench.fingerprints", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", type=int, default=1_000_000, help="bytes of each body")
    given = parser.parse_args()
    sys.path.insert(0, str(ROOT / "src"))
    from oncekey.canonical.jcs import canonical_json  # noqa: PLC0415
    from oncekey.core.errors import BodyInvalidError  # noqa: PLC0415

    print(f"{'':26}{'json.loads':>12}{'canonical':>12}{'times':>8}")
    for name, body in bodies(given.size).items():
        refused = ""

        def canonical(body: bytes = body) -> None:
            nonlocal refused
            try:
                canonical_json(body)
            except BodyInvalidError:
                refused = "  refused"

        base, ours = (milliseconds(work, given.rounds) for work in (lambda body=body: json.loads(body), canonical))
        print(f"{name:26}{base:>9.1f} ms{ours:>9.1f} ms{ours / base:>8.1f}{refused}")


if __name__ == "__main__":
    main()
