"""A small Django project, on two databases: `on_default` and `on_lite` are the same site on each of them."""
