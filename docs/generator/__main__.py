"""Write the generated pages: `python -m docs.generator`."""

from __future__ import annotations

import sys

from . import FOLDER, PAGES

for name, page in PAGES.items():
    (FOLDER / name).write_text(page(), encoding="utf-8")
    sys.stdout.write(f"{name}\n")
