"""The statements that SQLite and MariaDB share: a record is one row, and one statement moves it.

Where only the syntax differs, each store's own package has a part in `spelling.sql`; a statement that differs
altogether is also in that package.
"""
