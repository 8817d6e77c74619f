"""The flows of oncekey as generators without I/O, and the shells that run them blocking or under asyncio."""
