"""`oncekey-demo` runs the reference service on this machine; `oncekey provider` runs its simulated provider.

`oncekey demo` is the same as `oncekey-demo`.
"""

from __future__ import annotations

import secrets
import sys
import uuid
from collections import Counter
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from oncekey.cli.printing import address
from oncekey.core.errors import OncekeyError
from oncekey.core.policy import Policy

LONGEST = 3600
"""The maximum duration of traffic in seconds."""
DEFAULT_STORE = "sqlite:///oncekey-demo.db"
MONEY = '{"customer_id": "cus_1001", "amount_cents": 1999, "currency": "EUR"}'
ORDER = '{"customer_id": "cus_1001", "items": [{"product_id": "sku_teapot", "quantity": 2}]}'


class Switch(StrEnum):
    """On or off."""

    ON = "on"
    OFF = "off"


def register(app: typer.Typer) -> None:
    """Add the commands `demo` and `provider`."""
    app.command("demo")(demo)
    app.command("provider")(provider)


def main() -> None:
    """Run the program `oncekey-demo`."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(demo)
    app(prog_name="oncekey-demo")


def demo(  # noqa: PLR0917  (typer reads the parameters)
    store: Annotated[
        str, typer.Option(help="Where orders and keys are stored: sqlite:///file.db or postgresql://…")
    ] = DEFAULT_STORE,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port to listen on; 0 picks a free one.")] = 8000,
    lease: Annotated[
        float, typer.Option(help="Seconds after which a retry may execute a request whose server died.")
    ] = 30.0,
    call_timeout: Annotated[float, typer.Option(help="Seconds that a call to the provider may take.")] = 10.0,
    workers: Annotated[
        bool, typer.Option(help="Run the workers in this process; otherwise run `oncekey worker`.")
    ] = True,
    interval: Annotated[
        float, typer.Option(help="Seconds between two rounds of the sweeper and of the reconciler.")
    ] = 30.0,
    webhooks: Annotated[
        Switch, typer.Option(help="Whether the demo's own provider sends a webhook for each charge.")
    ] = Switch.ON,
    provider: Annotated[
        str | None, typer.Option(help="A running provider; by default the demo starts its own.", metavar="URL")
    ] = None,
    traffic: Annotated[
        int | None,
        typer.Option(
            min=1, max=LONGEST, help="Send requests with faults to the demo for that many seconds.", metavar="SECONDS"
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="With --traffic: the seed; the same seed sends the same requests.", min=0)
    ] = None,
    provider_ledger: Annotated[
        Path | None,
        typer.Option(help="The ledger of the demo's own provider. [default: next to the store]", metavar="FILE"),
    ] = None,
    show_version: Annotated[  # noqa: ARG001  (its callback prints it)
        bool,
        typer.Option(
            "--version", is_eager=True, callback=lambda asked: _version(asked=asked), help="Print the version."
        ),
    ] = False,
) -> None:
    """Serve a small shop with idempotency keys, and a simulated payment provider."""
    from oncekey_demo.serving import serve
    from oncekey_demo.traffic import Traffic

    link = ""

    def announced(url: str, console: str) -> None:
        nonlocal link
        link = console
        announce(url, console, store)

    def show_progress(passed: int, seconds: int, responses: Counter[str]) -> None:
        counts = ", ".join(f"{count} x {status}" for status, count in sorted(responses.items()))
        end = f"\nOperators' console: {link}" if passed == seconds else ""
        print(f"traffic: {passed} of {seconds} s. {counts}{end}", file=sys.stderr, flush=True)

    try:
        policy = policy_for(lease, call_timeout, interval)
        serve(
            store,
            policy if traffic is None else with_traffic(policy),
            host=host,
            port=port,
            provider=provider,
            workers=workers,
            webhooks=webhooks is Switch.ON,
            ledger=provider_ledger,
            announce=announced,
            traffic=None if traffic is None else Traffic(traffic, _seed(seed), show_progress),
        )
    except OncekeyError as error:
        fail(str(error))
    except KeyboardInterrupt:
        print()


def _version(*, asked: bool) -> None:
    if asked:
        print(f"oncekey-demo {version('oncekey-demo')}")
        raise typer.Exit


def policy_for(lease: float, call_timeout: float = 10.0, interval: float = 30.0) -> Policy:
    """The default policy with another lease; a handler may run for an hour, or for one lease if that is longer.

    With a short lease a person can watch a recovery, so workers and calls wait no longer than the lease.
    """
    usual = Policy()
    return usual.override(
        lease=lease,
        deadline=max(lease, usual.deadline.total_seconds()),
        call_timeout=call_timeout,
        outbox_lease=min(lease, usual.outbox_lease.total_seconds()),
        send_window=min(lease, usual.send_window.total_seconds()),
        complete_interval=min(lease, usual.complete_interval.total_seconds()),
        sweep_interval=interval,
        reconcile_interval=interval,
        provider_lag=min(lease, usual.provider_lag.total_seconds()),
    )


def with_traffic(policy: Policy) -> Policy:
    """The policy for `--traffic`: dead letters and unknown outcomes remain, so that the console shows some.

    Workers give up on a message soon, and check an unknown outcome with the provider after half an hour.
    """
    return policy.override(outbox_max_attempts=2, provider_lag=1800.0)


def announce(url: str, console: str, store: str) -> None:
    """Print the demo's URL, its console's URL, and commands to try."""
    heading = f"oncekey-demo: a small shop at {url}, which stores its orders in {address(store)}"
    steps = curl_lines(url, str(uuid.uuid4()))
    if sys.stdout.isatty():
        _richly(heading, url, console, steps)
    else:
        print(
            heading,
            f"Operators' console: {console}",
            *(f"\n# {result}\n{command}" for result, command in steps),
            sep="\n",
            flush=True,
        )


def _seed(given: int | None) -> int:
    seed = secrets.randbelow(1_000_000) if given is None else given
    print(f"traffic: seed {seed}", file=sys.stderr, flush=True)
    return seed


def curl_lines(url: str, key: str) -> list[tuple[str, str]]:
    """The commands to try, each with its result."""
    who = "-H 'Authorization: Bearer demo-alpha'"
    send = (
        f"curl -i {url}/orders {who} \\\n"
        f"  -H 'Idempotency-Key: \"{key}\"' -H 'Content-Type: application/json' \\\n"
        f"  -d '{ORDER}'"
    )
    return [
        ("Place an order. Run it twice: one order, the same bytes, Idempotent-Replayed: true", send),
        ("The same key with another body: 422", send.replace('"quantity": 2', '"quantity": 3')),
        (
            "A slow order. Run it in two terminals at the same time: the second receives 409 with Retry-After",
            send.replace(key, str(uuid.uuid4())).replace(who, f"{who} -H 'X-Demo-Delay: 3'"),
        ),
        (
            "A payment whose provider charges and disconnects: 500. Run it again without X-Demo-Fault: 201, one charge",
            send.replace(f"{url}/orders", f"{url}/payments")
            .replace(key, str(uuid.uuid4()))
            .replace(who, f"{who} -H 'X-Demo-Fault: drop-after'")
            .replace(ORDER, MONEY),
        ),
        ("The provider's charges", f"curl {url}/demo/ledger"),
        ("The orders; the other tenant is demo-beta", f"curl {url}/orders {who}"),
    ]


def fail(sentence: str) -> NoReturn:
    """Print one line to standard error, and exit with code 1."""
    print(f"oncekey-demo: {sentence}", file=sys.stderr)
    raise typer.Exit(1)


def _richly(heading: str, url: str, console_url: str, steps: list[tuple[str, str]]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    console.print(Text(heading, style="bold"), soft_wrap=True)
    console.print(Text.assemble("In a browser: ", (url, "underline cyan"), ". Press Ctrl-C to stop."), soft_wrap=True)
    console.print(Text.assemble("Operators' console: ", (console_url, "underline cyan")), soft_wrap=True)
    for result, command in steps:
        console.print(Text(f"\n# {result}", style="dim"), soft_wrap=True)
        console.print(Text(command, style="green"), soft_wrap=True)
    console.print()


DEFAULT_LEDGER = "oncekey-demo-provider.db"
DEFAULT_PORT = 8001
DEFAULT_SECRET = "whsec_demo_of_oncekey"  # noqa: S105  (a demo's)


def provider(  # noqa: PLR0917  (typer reads the parameters)
    ledger: Annotated[Path, typer.Option(help="The SQLite file with one row per charge.")] = Path(DEFAULT_LEDGER),
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="The port to listen on; 0 picks a free one.")
    ] = DEFAULT_PORT,
    webhooks: Annotated[
        str | None, typer.Option(help="Where to send a webhook for each charge: http://127.0.0.1:8000/…", metavar="URL")
    ] = None,
    secret: Annotated[str, typer.Option(help="The secret that signs webhooks.")] = DEFAULT_SECRET,
    until_eof: Annotated[bool, typer.Option("--until-eof", help="End when standard input ends.", hidden=True)] = False,
) -> None:
    """Serve a simulated payment provider. Requests choose how it fails."""
    from oncekey_demo.provider_server import serve

    try:
        serve(
            ledger,
            host=host,
            port=port,
            webhooks=webhooks,
            secret=secret,
            until_eof=until_eof,
            announce=lambda url: print(f"oncekey provider: {url} stores its charges in {ledger}", flush=True),
        )
    except OncekeyError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        print()


def _fail(sentence: str) -> NoReturn:
    print(f"oncekey provider: {sentence}", file=sys.stderr)
    raise typer.Exit(1)
