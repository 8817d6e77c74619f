"""The named commands of a store, with its clock: shared by all parts of one store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from oncekey.flow import Statement

if TYPE_CHECKING:
    from oncekey.core.model import Instant
    from oncekey.flow import Command, Value


class Statements:
    """Named commands. `clock` gives every instant in tests that control time; without it the store's own clock does."""

    def __init__(self, commands: Mapping[str, Command], clock: Callable[[], Instant] | None = None) -> None:
        self._commands = commands
        self._clock = clock

    def require(self, names: tuple[str, ...]) -> None:
        """Raise if the store has no command for one of these names."""
        missing = set(names) - set(self._commands)
        if missing:
            raise ValueError(f"a store needs a statement for {', '.join(sorted(missing))}")

    def has(self, name: str) -> bool:
        """Whether the store has a command that is optional."""
        return name in self._commands

    def statement(
        self,
        name: str,
        params: dict[str, Value],
        *,
        form: str | None = None,
        reads: bool = False,
        at_once: bool = False,
    ) -> Statement:
        """One statement with its parameters and its instant.

        `form` names another command for the same, which a store may have for a case in which it is cheaper.
        """
        now = self.instant
        command = self._commands[name] if form is None else self._commands.get(form, self._commands[name])
        return Statement(name, command, {**params, "now": now}, reads=reads, at_once=at_once)

    def fold(self, name: str, params: dict[str, Value], *, text_command: str, proof: str | None = None) -> Statement:
        """A statement that may be sent in the message of a BEGIN or a COMMIT; `text_command` names its form as text."""
        text = self._commands[text_command]
        assert isinstance(text, str)
        if "now" not in params:
            params["now"] = None if self._clock is None else self._clock()
        proven = None if proof is None else self._commands[proof]
        return Statement(name, self._commands[name], params, folds=True, text=text, proof=proven)

    @property
    def instant(self) -> Instant | None:
        """The instant of all statements, in tests that control time. None: the store's own clock is used."""
        return None if self._clock is None else self._clock()
