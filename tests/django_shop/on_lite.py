"""The site on SQLite, beside the default database."""

from __future__ import annotations

from django_shop.site import site

once, urlpatterns = site("lite")
