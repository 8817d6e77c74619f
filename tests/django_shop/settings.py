"""Where the databases are comes from the environment: tests make them first."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit


def _database(address: str) -> dict[str, Any]:
    if address.startswith("mysql:"):
        import pymysql

        pymysql.install_as_MySQLdb()
        return {"ENGINE": "django.db.backends.mysql", "NAME": "shop", "HOST": "127.0.0.1", "PORT": "1"}
    if not address.startswith("postgresql:"):
        options = {"transaction_mode": os.environ.get("SHOP_MODE", "IMMEDIATE"), "timeout": 30}
        return {"ENGINE": "django.db.backends.sqlite3", "NAME": address, "OPTIONS": options}
    parts = urlsplit(address)
    query = dict(parse_qsl(parts.query))
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": parts.path.lstrip("/"),
        "USER": parts.username or query.get("user", ""),
        "PASSWORD": parts.password or "",
        "HOST": parts.hostname or query.get("host", ""),
        "PORT": str(parts.port or query.get("port", "")),
    }


SECRET_KEY = "of the tests"
DEBUG = False
ALLOWED_HOSTS = ["*"]
USE_TZ = True
SHOP_ALIAS = os.environ.get("SHOP_ALIAS", "default")
DATABASES = {"default": _database(os.environ["SHOP_DATABASE"])}
DATABASES["default"]["ATOMIC_REQUESTS"] = "SHOP_ATOMIC" in os.environ
if "SHOP_QUERIES_FIRST" in os.environ:
    DATABASES["default"]["CONN_MAX_AGE"] = None  # what was opened stays open
if "SHOP_LITE" in os.environ:
    DATABASES["lite"] = _database(os.environ["SHOP_LITE"])
DATABASE_ROUTERS = ["django_shop.models.Router"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "rest_framework",
    "drf_spectacular",
    "oncekey.django",
    "django_shop",
]
MIDDLEWARE = [
    "django.middleware.gzip.GZipMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    *(["django_shop.meddling.ReadsEarly"] if "SHOP_READS" in os.environ else []),
    "oncekey.django.Middleware",
]
ROOT_URLCONF = f"django_shop.on_{SHOP_ALIAS}"
ONCEKEY = f"django_shop.on_{SHOP_ALIAS}.once"
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [Path(__file__).parent / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": ["django_shop.people.ByHeader"],
    "DEFAULT_PERMISSION_CLASSES": ["rest_framework.permissions.IsAuthenticated"],
    "DEFAULT_SCHEMA_CLASS": "drf_spectacular.openapi.AutoSchema",
    "TEST_REQUEST_DEFAULT_FORMAT": "json",
}
SPECTACULAR_SETTINGS = {
    "POSTPROCESSING_HOOKS": [
        "drf_spectacular.hooks.postprocess_schema_enums",
        "oncekey.django.describe_keys",
    ]
}
STATIC_URL = "static/"
