"""A payments service on Django and REST framework, in one file: README.md has the command that starts it.

A project of yours has all of this in modules of their own, as docs/howto/django.md shows.
"""

from __future__ import annotations

import sys
from typing import Any

import django
from django.apps import apps
from django.conf import settings
from django.core.management import call_command
from django.db import models

settings.configure(
    SECRET_KEY="only for this example",  # noqa: S106  (nothing here is signed with it)
    ALLOWED_HOSTS=["127.0.0.1", "localhost"],
    ROOT_URLCONF=__name__,
    DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
    DATABASES={
        "default": {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": "django-shop.db",
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
from provider import charge  # noqa: E402
from rest_framework import serializers  # noqa: E402
from rest_framework.authentication import BaseAuthentication  # noqa: E402
from rest_framework.permissions import BasePermission  # noqa: E402
from rest_framework.response import Response  # noqa: E402
from rest_framework.views import APIView  # noqa: E402
from shop_tables import tenant_of  # noqa: E402

from oncekey import INLINE, LOCAL, OUTBOX, PHASED, Message, Reply, SyncOperation, resumed_as  # noqa: E402
from oncekey.django import Once  # noqa: E402

once = Once(tenant=lambda request: request.user, workers=True)


class Order(models.Model):
    """What was ordered."""

    tenant = models.TextField()
    product = models.TextField()
    quantity = models.IntegerField()

    def __str__(self) -> str:
        return f"{self.quantity} x {self.product}"


class Payment(models.Model):
    """What was paid."""

    tenant = models.TextField()
    cents = models.IntegerField()
    charge = models.TextField(default="")

    def __str__(self) -> str:
        return f"{self.cents} cents"


class Tokens(BaseAuthentication):
    """The caller's tenant. A worker that resumes a request has no token: it acts for the stored tenant."""

    def authenticate(self, request: Any) -> tuple[str, None] | None:  # noqa: ANN401  (REST framework has no types)
        asked = request._request  # noqa: SLF001  (Django's own, which has the environ)
        tenant = resumed_as(asked) or tenant_of(request.headers.get("Authorization"))
        return None if tenant is None else (tenant, None)

    def authenticate_header(self, request: Any) -> str:  # noqa: ANN401, ARG002
        return "Bearer"


class IsKnown(BasePermission):
    """A client with a token."""

    def has_permission(self, request: Any, view: Any) -> bool:  # noqa: ANN401, ARG002
        return request.user is not None


class OrderIn(serializers.Serializer):
    """What a client orders."""

    product = serializers.CharField()
    quantity = serializers.IntegerField(min_value=1)


class Money(serializers.Serializer):
    """What a client pays."""

    cents = serializers.IntegerField(min_value=1)


class Valid(APIView):
    """Refuses what is not valid before the key is claimed, so that a client may mend it and send it again."""

    authentication_classes = (Tokens,)
    permission_classes = (IsKnown,)
    takes: type[serializers.Serializer] = Money

    def valid(self) -> dict[str, Any]:
        """What was sent."""
        found = self.takes(data=self.request.data)
        found.is_valid(raise_exception=True)
        return found.validated_data


class Orders(Valid):
    """LOCAL: the row, the key and the response commit together, or not at all."""

    takes = OrderIn

    @once.protect(effects=LOCAL, authorise=Valid.valid)
    def post(self, request: Any) -> Response:  # noqa: ANN401
        order = Order.objects.create(tenant=request.user, **self.valid())
        return Response({"id": order.pk, "status": "created"}, status=201)

    def get(self, request: Any) -> Response:  # noqa: ANN401
        return Response(list(Order.objects.filter(tenant=request.user).values("id", "product", "quantity")))


def begin(_: object, tenant: str, cents: int) -> int:
    """The first step of a payment. The connection is Django's own, so the ORM writes through it."""
    return int(Payment.objects.create(tenant=tenant, cents=cents).pk)


def settle(_: object, number: int, charge_id: str) -> None:
    """The last step."""
    Payment.objects.filter(pk=number).update(charge=charge_id)


class Payments(Valid):
    """PHASED: after a crash at any point, a retry or a worker resumes at the last step."""

    # The seconds say how long a payment waits after a crash.
    @once.protect(effects=PHASED, lease=10, call_timeout=10, authorise=Valid.valid)
    def post(self, request: Any, op: SyncOperation) -> Response:  # noqa: ANN401
        cents = self.valid()["cents"]
        number = op.phase("payment_created", begin, request.user, cents)
        made = op.call("charged", charge, cents, repeatable=True)
        op.phase("payment_settled", settle, number, made["id"])
        return Response({"id": number, "charge": made["id"]}, status=201)


class Transfers(Valid):
    """OUTBOX: a worker makes the call and the answer; until then it is 202."""

    @once.protect(effects=OUTBOX, authorise=Valid.valid)
    def post(self, request: Any, op: SyncOperation) -> Response:  # noqa: ANN401, ARG002
        op.defer("transfer", self.valid())
        return Response(status=202)


@once.topic("transfer", repeatable=True)
def transfer(message: Message) -> Reply:
    """What the worker does."""
    made = charge(message.payload["cents"], key=message.downstream_key)
    return Reply(201, {"charge": made["id"]})


class Charges(Valid):
    """INLINE: one outside call, under a key that its provider recognises; an outcome that is lost is called unknown."""

    @once.protect(effects=INLINE, authorise=Valid.valid)
    def post(self, request: Any, op: SyncOperation) -> Response:  # noqa: ANN401, ARG002
        made = charge(self.valid()["cents"], key=op.downstream_key("charge"))
        return Response({"charge": made["id"]}, status=201)


urlpatterns = [
    path("orders", Orders.as_view()),
    path("payments", Payments.as_view()),
    path("transfers", Transfers.as_view()),
    path("charges", Charges.as_view()),
]
apps.get_app_config(__name__).models_module = sys.modules[__name__]  # Django looks for a module of their own
call_command("migrate", run_syncdb=True, verbosity=0)
app = get_wsgi_application()
