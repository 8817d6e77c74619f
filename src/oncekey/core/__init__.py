"""The decisions, pure: no clock, no randomness, no threads, no sockets; every instant is handed in."""
