"""The reference service that `oncekey demo` runs: a small shop whose requests a client may send repeatedly."""
