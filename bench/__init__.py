"""The cost of oncekey: the demo's `POST /orders` with and without it. See README.md."""
