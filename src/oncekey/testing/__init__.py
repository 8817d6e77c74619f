"""What tests of stores, drivers and applications stand on; shipped, and with no dependency of its own."""
