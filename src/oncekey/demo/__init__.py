"""The reference service that `oncekey demo` runs: a small shop whose requests may be sent as often as one likes."""
