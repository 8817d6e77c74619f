"""All I/O with stores. A driver knows `flow` and the errors, and nothing else of oncekey."""
