"""The runtimes that perform the flows: under asyncio and in threads. The proofs bring runtimes of their own."""
