"""A payments service on Django and REST framework, in one file; README.md has the command to start it.

A real project splits this into modules, as docs/howto/django.md shows.
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
    SECRET_KEY="only for this example",  # noqa: S106  (it signs nothing here)
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
    """An order."""

    tenant = models.TextField()
    product = models.TextField()
    quantity = models.IntegerField()

    def __str__(self) -> str:
        return f"{self.quantity} x {self.product}"


class Payment(models.Model):
    """A payment, with the provider's charge."""

    tenant = models.TextField()
    cents = models.IntegerField()
    charge = models.TextField(default="")

    def __str__(self) -> str:
        return f"{self.cents} cents"


class Tokens(BaseAuthentication):
    """The caller's tenant. A worker that resumes a request has no token: it acts for the stored tenant."""

    def authenticate(self, request: Any) -> tuple[str, None] | None:  # noqa: ANN401  (REST framework has no types)
        django_request = request._request  # noqa: SLF001  (Django's request, which has the environ)
        tenant = resumed_as(django_request) or tenant_of(request.headers.get("Authorization"))
        return None if tenant is None else (tenant, None)

    def authenticate_header(self, request: Any) -> str:  # noqa: ANN401, ARG002
        return "Bearer"


class HasTenant(BasePermission):
    """Allows requests with a valid token."""

    def has_permission(self, request: Any, view: Any) -> bool:  # noqa: ANN401, ARG002
        return request.user is not None


class OrderIn(serializers.Serializer):
    """The body of an order."""

    product = serializers.CharField()
    quantity = serializers.IntegerField(min_value=1)


class PaymentIn(serializers.Serializer):
    """The body of a payment."""

    cents = serializers.IntegerField(min_value=1)


class ValidatedView(APIView):
    """Rejects an invalid body before the key is claimed, so a client can correct it and retry."""

    authentication_classes = (Tokens,)
    permission_classes = (HasTenant,)
    serializer_class: type[serializers.Serializer] = PaymentIn

    def validated(self) -> dict[str, Any]:
        """The validated body."""
        serializer = self.serializer_class(data=self.request.data)
        serializer.is_valid(raise_exception=True)
        return serializer.validated_data


class Orders(ValidatedView):
    """LOCAL: the row, the key and the response commit together, or not at all."""

    serializer_class = OrderIn

    @once.protect(effects=LOCAL, authorise=ValidatedView.validated)
    def post(self, request: Any) -> Response:  # noqa: ANN401
        order = Order.objects.create(tenant=request.user, **self.validated())
        return Response({"id": order.pk, "status": "created"}, status=201)

    def get(self, request: Any) -> Response:  # noqa: ANN401
        return Response(list(Order.objects.filter(tenant=request.user).values("id", "product", "quantity")))


def begin(_: object, tenant: str, cents: int) -> int:
    """The first step of a payment: insert the row. The connection is Django's, so the ORM writes through it."""
    return int(Payment.objects.create(tenant=tenant, cents=cents).pk)


def settle(_: object, payment_id: int, charge_id: str) -> None:
    """The last step."""
    Payment.objects.filter(pk=payment_id).update(charge=charge_id)


class Payments(ValidatedView):
    """PHASED: after a crash at any point, a retry or a worker resumes after the last stored step."""

    # These seconds limit how long a payment waits after a crash.
    @once.protect(effects=PHASED, lease=10, call_timeout=10, authorise=ValidatedView.validated)
    def post(self, request: Any, op: SyncOperation) -> Response:  # noqa: ANN401
        cents = self.validated()["cents"]
        payment_id = op.phase("payment_created", begin, request.user, cents)
        charged = op.call("charged", charge, cents, repeatable=True)
        op.phase("payment_settled", settle, payment_id, charged["id"])
        return Response({"id": payment_id, "charge": charged["id"]}, status=201)


class Transfers(ValidatedView):
    """OUTBOX: responds with 202; a worker makes the call and stores the final response."""

    @once.protect(effects=OUTBOX, authorise=ValidatedView.validated)
    def post(self, request: Any, op: SyncOperation) -> Response:  # noqa: ANN401, ARG002
        op.defer("transfer", self.validated())
        return Response(status=202)


@once.topic("transfer", repeatable=True)
def transfer(message: Message) -> Reply:
    """Charge the card, in a worker."""
    charged = charge(message.payload["cents"], key=message.downstream_key)
    return Reply(201, {"charge": charged["id"]})


class Charges(ValidatedView):
    """INLINE: one external call with a downstream key; if its reply is lost, the outcome is unknown."""

    @once.protect(effects=INLINE, authorise=ValidatedView.validated)
    def post(self, request: Any, op: SyncOperation) -> Response:  # noqa: ANN401, ARG002
        charged = charge(self.validated()["cents"], key=op.downstream_key("charge"))
        return Response({"charge": charged["id"]}, status=201)


urlpatterns = [
    path("orders", Orders.as_view()),
    path("payments", Payments.as_view()),
    path("transfers", Transfers.as_view()),
    path("charges", Charges.as_view()),
]
apps.get_app_config(__name__).models_module = sys.modules[__name__]  # instead of a separate models.py
call_command("migrate", run_syncdb=True, verbosity=0)
app = get_wsgi_application()
