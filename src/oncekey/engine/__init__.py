"""oncekey's flows as generators without I/O, and the shells that run them in blocking code or under asyncio."""
