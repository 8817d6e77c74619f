"""The statements that SQLite and MariaDB share: a record is one row, and one statement moves it.

Where they only spell something differently, it is a part in `spelling.sql` of each store's own package; where they need
another statement altogether, it is there, too.
"""
