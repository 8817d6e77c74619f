"""The shop for servers."""

from __future__ import annotations

import os

from django.core.asgi import get_asgi_application
from django.core.wsgi import get_wsgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "django_shop.settings")

application = get_wsgi_application()
asgi = get_asgi_application()

if "SHOP_QUERIES_FIRST" in os.environ:
    from django_shop.models import Order

    Order.objects.count()  # as a check in `ready()` does, before gunicorn forks its workers
