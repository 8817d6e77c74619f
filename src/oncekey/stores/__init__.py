"""The statements for each store, by name, and the form of a record in rows. No I/O."""
