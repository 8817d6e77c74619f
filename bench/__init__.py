"""What oncekey costs: the demo's `POST /orders` with and without it, side by side. See README.md."""
