"""The tortured shop as a module: `app` for its servers, `once` for `oncekey worker --app`."""

from __future__ import annotations

from oncekey_demo.torture.plan import Settings
from oncekey_demo.torture.shop import Shop

shop = Shop(Settings.from_environment())
once = shop.once
app = shop.app
