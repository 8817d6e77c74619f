"""What the tests stand on: private PostgreSQL servers, a proxy that loses bytes, free ports."""
