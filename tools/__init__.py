"""What contributors run on the source, beside the generators of pages in `docs/generator`."""
