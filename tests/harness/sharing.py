"""Which tests one worker runs together: those that share what takes longer to make than to use.

pytest-xdist gives every test to the worker that is free, so that each worker makes a module's fixtures for itself: a
second demo, a second browser, the second run of eighty broken shops. Marks of pytest-xdist cannot say what belongs
together: it hangs a group on the name of a test, and pytest 9.2 has no place for that any more. So the module decides,
or the class.
"""

from __future__ import annotations

import re
from typing import Any

from xdist.scheduler import LoadScopeScheduling

CONFORMANCE = "conformance"  # both need all the processor there is, and so not at the same time
TOGETHER = {
    "tests/conformance/test_mutants.py": CONFORMANCE,
    "tests/conformance/test_odd.py": CONFORMANCE,
    **{
        module: module
        for module in (
            "tests/conformance/test_reports.py",
            "tests/console/test_browser.py",
            "tests/console/test_plans.py",
            "tests/proof/test_real_processes.py",
            "tests/proof/test_simulator.py::TestCrowd",
            "tests/demo/test_bad_input.py",
            "tests/demo/test_browser.py",
            "tests/demo/test_faults.py",
            "tests/demo/test_once.py",
            "tests/demo/test_orders.py",
            "tests/demo/test_page.py",
            "tests/demo/test_provider.py",
            "tests/docs/test_examples.py",
            "tests/docs/test_site.py",
            "tests/drivers/postgres/test_standby.py",
            "tests/ended/test_ended.py",
            "tests/meta/test_wheel.py",
            "tests/outbox/test_accepted.py",
            "tests/peers/test_judged.py",
            "tests/reconcile/test_plans.py",
            "tests/skins/test_skins.py",
            "tests/upkeep/test_plans.py",
        )
    },
}
_PARTS = {
    "tests/ended/test_ended.py": re.compile(r"\[([a-z-]+)-(?:local|phased|outbox)-"),
    "tests/outbox/test_accepted.py": re.compile(r"\[([a-z-]+)-[a-z]+\]"),
    "tests/proof/test_real_processes.py": re.compile(r"\[(sqlite|postgresql)"),
    "tests/skins/test_skins.py": re.compile(r"\[([a-z-]+-(?:sqlite|postgresql))"),
}
"""Modules of which each part is a group of its own."""


def group_of(test: str) -> str:
    """What is given to a worker at once: the tests that have the same group."""
    module, *inside = test.split("::", 2)
    group = TOGETHER.get(module) or TOGETHER.get("::".join((module, *inside[:1])), test)
    part = _PARTS[module].search(test) if module in _PARTS else None
    return f"{group} on {part[1]}" if part else group


_LONG = ("tests/torture/", "tests/race/", "tests/contract/test_sql_mutants.py", "tests/upkeep/test_bound.py")
_SHORT = ("tests/core/", "tests/sealing/", "tests/stores/")


def turn_of(test: str) -> int:
    """When a test has its turn: those that take half a minute first, and those of milliseconds last.

    The short ones fill what is left of each worker's time, so that all workers end together.
    """
    return 0 if test.startswith(_LONG) else 2 if test.startswith(_SHORT) else 1


class Sharing(LoadScopeScheduling):  # type: ignore[misc]  # pytest-xdist says nothing of its types
    """Gives groups away, the largest first, and then one test after the other."""

    def __init__(self, config: Any, log: Any = None) -> None:
        super().__init__(config, log)
        self._numbers: dict[str, int] = {}

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)

    def _assign_work_unit(self, node: Any) -> None:
        """Give a worker the next group, by numbers: pytest-xdist would search a list of all tests for each."""
        if not self._numbers:
            self._numbers = {test: number for number, test in enumerate(self.collection)}
        group, unit = self.workqueue.popitem(last=False)
        self.assigned_work[node][group] = unit
        node.send_runtest_some([self._numbers[test] for test, done in unit.items() if not done])

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        """Forget what is done: pytest-xdist counts all that a worker was ever given, several times for every test."""
        del duration
        test = self.registered_collections[node][item_index]
        group = group_of(test)
        unit = self.assigned_work[node][group]
        del unit[test]
        if not unit:
            del self.assigned_work[node][group]
        self._reschedule(node)
