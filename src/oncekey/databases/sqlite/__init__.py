"""SQLite: its file, its one writer, the lane of an event loop, and the connections for handlers."""
