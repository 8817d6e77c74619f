"""Redis and Valkey: a record in one cell of the store of cells."""
