"""A payments service with Django and REST framework, in one file: `python examples/django_shop.py --port 8000`.

`POST /orders` is LOCAL: the order and its stored answer are one commit. `POST /payments` is PHASED: rows, a call, rows,
and the process may die between any two lines; a retry, or a worker, goes on. The file `django-shop.db` is made, or the
one that `SHOP_DATABASE` names.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import django
from django.apps import apps
from django.conf import settings
from django.core.management import call_command
from django.db import models

TOKENS = {"token-of-ann": "ann", "token-of-bob": "bob"}  # yours are in your database

settings.configure(
    SECRET_KEY=os.environ.get("SHOP_SECRET", "only for this example"),
    ALLOWED_HOSTS=["127.0.0.1", "localhost"],
    ROOT_URLCONF=__name__,
    DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
    DATABASES={
        "default": {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": os.environ.get("SHOP_DATABASE", "django-shop.db"),
            "OPTIONS": {"transaction_mode": "IMMEDIATE"},
        }
    },
    INSTALLED_APPS=["rest_framework", "oncekey.django", __name__],
    MIDDLEWARE=["oncekey.django.Middleware"],
    REST_FRAMEWORK={"DEFAULT_AUTHENTICATION_CLASSES": [], "UNAUTHENTICATED_USER": None},
    ONCEKEY=f"{__name__}.once",
)
django.setup()

from django.core.wsgi import get_wsgi_application  # noqa: E402  (Django has to be set up first)
from django.urls import path  # noqa: E402
from rest_framework import serializers  # noqa: E402
from rest_framework.authentication import BaseAuthentication  # noqa: E402
from rest_framework.permissions import BasePermission  # noqa: E402
from rest_framework.response import Response  # noqa: E402
from rest_framework.views import APIView  # noqa: E402

from oncekey import LOCAL, PHASED, SyncOperation, resumed_as  # noqa: E402
from oncekey.django import Once  # noqa: E402

once = Once(tenant=lambda request: request.user)


class Order(models.Model):
    """What was ordered."""

    tenant = models.TextField()
    product_id = models.TextField()
    quantity = models.IntegerField()

    def __str__(self) -> str:
        return f"{self.quantity} x {self.product_id}"


class Payment(models.Model):
    """What was charged."""

    tenant = models.TextField()
    amount_cents = models.IntegerField()
    charge = models.TextField(default="")

    def __str__(self) -> str:
        return f"{self.amount_cents} cents"


class Tokens(BaseAuthentication):
    """Who calls; a worker that goes on with a request has no token, and says in whose name it does."""

    def authenticate(self, request: Any) -> tuple[str, None] | None:  # noqa: ANN401  (REST framework has no types)
        token = request.META.get("HTTP_AUTHORIZATION", "").removeprefix("Bearer ")
        name = resumed_as(request._request) or TOKENS.get(token)  # noqa: SLF001  (Django's own, which has the environ)
        return None if name is None else (name, None)

    def authenticate_header(self, request: Any) -> str:  # noqa: ANN401, ARG002
        return "Bearer"


class IsKnown(BasePermission):
    """Somebody with a token."""

    def has_permission(self, request: Any, view: Any) -> bool:  # noqa: ANN401, ARG002
        return request.user is not None


class OrderIn(serializers.Serializer):
    """What a client sends for an order."""

    product_id = serializers.CharField()
    quantity = serializers.IntegerField(min_value=1)


class PaymentIn(serializers.Serializer):
    """What a client sends for a payment."""

    amount_cents = serializers.IntegerField(min_value=1)


class Valid(APIView):
    """Refuses what is not valid before the key is claimed, so that a client may mend it and send it again."""

    authentication_classes = (Tokens,)
    permission_classes = (IsKnown,)
    takes: type[serializers.Serializer]

    def valid(self) -> dict[str, Any]:
        """What was sent."""
        found = self.takes(data=self.request.data)
        found.is_valid(raise_exception=True)
        return found.validated_data


class Orders(Valid):
    """`/orders`."""

    takes = OrderIn

    def get(self, request: Any) -> Response:  # noqa: ANN401
        return Response({"total": Order.objects.filter(tenant=request.user).count()})

    @once.protect(effects=LOCAL, authorise=Valid.valid)
    def post(self, request: Any) -> Response:  # noqa: ANN401
        order = Order.objects.create(tenant=request.user, **self.valid())
        return Response({"id": order.pk, "status": "created"}, status=201)


class Payments(Valid):
    """`/payments`."""

    takes = PaymentIn

    @once.protect(effects=PHASED, authorise=Valid.valid)
    def post(self, request: Any, op: SyncOperation) -> Response:  # noqa: ANN401
        amount = self.valid()["amount_cents"]
        number = op.phase("created", lambda _: Payment.objects.create(tenant=request.user, amount_cents=amount).pk)
        made = op.call("charged", lambda key: charge(amount, key), repeatable=True)
        op.phase("settled", lambda _: Payment.objects.filter(pk=number).update(charge=made["id"]))
        return Response({"id": number, "charge": made["id"]}, status=201)


def charge(amount_cents: int, key: str) -> dict[str, Any]:
    """Ask your provider here, with `key` as its idempotency key."""
    return {"id": f"ch_{key[:12]}", "amount_cents": amount_cents}


urlpatterns = [path("orders", Orders.as_view()), path("payments", Payments.as_view())]
application = get_wsgi_application()


def main() -> None:
    """Make the tables, and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    apps.get_app_config(__name__).models_module = sys.modules[__name__]  # Django looks for a module of their own
    call_command("migrate", run_syncdb=True, verbosity=0)
    from django.core.servers.basehttp import run  # noqa: PLC0415  (a server to try it with, and for nothing else)

    print(f"http://127.0.0.1:{arguments.port}", flush=True)  # noqa: T201
    run("127.0.0.1", arguments.port, application, threading=True)


if __name__ == "__main__":
    main()
