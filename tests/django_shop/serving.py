"""The shop for servers."""

from __future__ import annotations

import os

from django.core.asgi import get_asgi_application
from django.core.wsgi import get_wsgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "django_shop.settings")

application = get_wsgi_application()
asgi = get_asgi_application()
