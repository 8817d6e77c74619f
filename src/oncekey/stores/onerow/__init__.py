"""What SQLite and MariaDB are told in the same words: a record is one row, and one statement moves it.

What they spell differently is a part, in `spelling.sql` of each store's own package; what they have to be told in
another way altogether is a statement of its own there.
"""
