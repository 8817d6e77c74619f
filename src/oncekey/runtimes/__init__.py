"""What performs the flows of the lifecycle: asyncio and threads. The proofs bring runtimes of their own."""
