from __future__ import annotations

from django.conf import settings
from django.db import models


class Router:
    """One site uses one database."""

    def db_for_read(self, model, **hints):
        return settings.SHOP_ALIAS

    db_for_write = db_for_read

    def allow_relation(self, one, other, **hints):
        return True


class Order(models.Model):  # noqa: DJ008  (nobody looks at it)
    tenant = models.TextField(default="")
    item = models.TextField()
    owner = models.TextField(default="")


class Line(models.Model):  # noqa: DJ008
    order = models.ForeignKey(Order, on_delete=models.CASCADE)


class Payment(models.Model):  # noqa: DJ008
    amount = models.IntegerField()
    charge = models.TextField(default="")
