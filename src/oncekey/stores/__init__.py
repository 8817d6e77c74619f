"""The named statements of stores, and the form of a record in rows. No I/O."""
