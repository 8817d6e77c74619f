"""What to say to a store: named statements, and how a record looks in rows. No I/O."""
