"""Small transactions to give to a driver."""

from __future__ import annotations

from oncekey.core.flow import Mode, Statement, Transaction


def saying(mode: Mode, *statements: tuple[str, dict] | str) -> Transaction:
    """A transaction of these statements; its result is what each of them answered."""

    def body():
        answers = []
        for statement in statements:
            sql, params = (statement, {}) if isinstance(statement, str) else statement
            rows = yield Statement("test", sql, params)
            answers.append([tuple(row) if not hasattr(row, "values") else tuple(row.values()) for row in rows])
        return answers

    return Transaction("test", mode, body)


def insert(item: str) -> tuple[str, dict]:
    return "INSERT INTO orders (item) VALUES (:item)", {"item": item}


def items(driver) -> list[str]:
    """What the application's table holds."""
    return items_of(driver.run(ALL_ITEMS))


def items_of(answers) -> list[str]:
    return [row[0] for row in answers[0]]


ALL_ITEMS = saying(Mode.READ, "SELECT item FROM orders ORDER BY id")


def a_stranger(path, module):
    """Somebody who writes to a SQLite file and is not of this process, as far as its drivers know."""
    connection = module.connect(path, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    return connection
