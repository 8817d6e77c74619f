"""SQLite: its file, its one writer, the lane of an event loop, and the connections that handlers get."""
