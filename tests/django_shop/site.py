"""The views, on one database."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

from asgiref.sync import sync_to_async
from django.contrib import admin
from django.contrib.auth.decorators import login_required
from django.core.exceptions import PermissionDenied
from django.db import IntegrityError, close_old_connections, connections, transaction
from django.http import Http404, HttpResponse, JsonResponse, StreamingHttpResponse
from django.template import engines
from django.template.response import SimpleTemplateResponse, TemplateResponse
from django.urls import include, path
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_http_methods
from drf_spectacular.views import SpectacularAPIView
from rest_framework import permissions, serializers, viewsets
from rest_framework.decorators import action, api_view
from rest_framework.exceptions import ValidationError
from rest_framework.response import Response
from rest_framework.routers import DefaultRouter
from rest_framework.throttling import BaseThrottle
from rest_framework.views import APIView

from django_shop.models import Line, Order, Payment
from django_shop.people import name_of
from oncekey import INLINE, LOCAL, OUTBOX, PHASED, NotExecutedError, Operation, Policy, SyncOperation
from oncekey.django import Database, Once

world = SimpleNamespace(
    runs=[], entered=threading.Semaphore(0), go=threading.Event(), owners={}, charges=[], hooks=[], asked=[]
)


def reset() -> None:
    world.runs.clear()
    world.charges.clear()
    world.hooks.clear()
    world.owners.clear()
    world.asked.clear()
    world.entered, world.go = threading.Semaphore(0), threading.Event()


def said(request) -> dict:
    return json.loads(request.body)


def tenant(request) -> str:
    return name_of(request) or "nobody"


class OrderSerializer(serializers.ModelSerializer):
    class Meta:
        model = Order
        fields = ("id", "item")


class IsOwner(permissions.BasePermission):
    def has_object_permission(self, request, view, obj):
        return world.owners.get(obj.pk, obj.owner) == request.user.name


class Twice(BaseThrottle):
    def allow_request(self, request, view):
        world.asked.append(request.method)
        return len(world.asked) <= 2


def behave(alias: str, does: str) -> HttpResponse | None:  # noqa: PLR0912  (a list of what views do)
    """What a view may do besides."""
    connection = connections[alias]
    match does:
        case "":
            return None
        case "raise":
            raise ZeroDivisionError
        case "missing":
            raise Http404
        case "forbidden":
            raise PermissionDenied
        case "refuse":
            return JsonResponse({"no": True}, status=409)
        case "teapot":
            return JsonResponse({"no": True}, status=503)
        case "set_rollback":
            transaction.set_rollback(True, using=alias)
        case "swallow":
            try:
                with transaction.atomic(using=alias, savepoint=False):
                    raise IntegrityError
            except IntegrityError:
                pass
        case "swallow_sql":
            try:
                with connection.cursor() as cursor:
                    cursor.execute("SELECT 1 FROM no_such_table")
            except Exception:
                pass
        case "close":
            connection.close()
        case "close_old":
            connection.close_at = 0
            close_old_connections()
        case "commit":
            transaction.commit(using=alias)
        case "raw_commit":
            with connection.cursor() as cursor:
                cursor.execute("/*x*/ end")
        case "search_path":
            with connection.cursor() as cursor:
                cursor.execute("SET search_path TO public")
        case "hook_fails":
            transaction.on_commit(lambda: 1 / 0, using=alias)
        case "hook":
            transaction.on_commit(lambda: world.hooks.append("ran"), using=alias)
        case "orphan":
            Line.objects.create(order_id=987654)
        case "left_open" | "left_open_and_raise":
            transaction.atomic(using=alias).__enter__()
            if does == "left_open_and_raise":
                raise ZeroDivisionError
        case "wait":
            world.entered.release()
            assert world.go.wait(60)
        case "kill":
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_backend_pid()")
                pid = cursor.fetchone()[0]
            other = connections.create_connection(alias)
            with other.cursor() as cursor:
                cursor.execute("SELECT pg_terminate_backend(%s)", [pid])
            other.close()
        case "exit":
            raise SystemExit(1)
        case "thread":
            thread = threading.Thread(target=_aside)
            thread.start()
            thread.join()
            raise ZeroDivisionError
        case "elsewhere":
            Order.objects.using("lite").create(item="in another database")
            raise ZeroDivisionError
        case "template" | "render callback":
            return does
        case "isolation":
            with connection.cursor() as cursor:
                cursor.execute("SHOW transaction_isolation")
                return JsonResponse({"isolation": cursor.fetchone()[0]}, status=201)
        case "slow":
            time.sleep(0.05)
        case "stream":
            return StreamingHttpResponse((b"piece %d;" % number for number in range(20)), status=201)
        case "cookie":
            response = JsonResponse({"ok": True}, status=201)
            response.set_cookie("seen", "yes")
            response["X-Own"] = "1"
            return response
        case _:
            raise AssertionError(does)
    return None


def _aside() -> None:
    Order.objects.create(item="from a thread")
    connections.close_all()


def site(alias: str) -> tuple[Once, list]:
    once = Once(
        Database(alias),
        tenant=tenant,
        status="/idempotency-keys",
        policy=Policy(secret=b"0123456789abcdef0123456789abcdef", lease=30, complete_interval=30),
        survey=False,
        workers="SHOP_WORKERS" in os.environ,
    )

    @csrf_exempt
    @once.protect(effects=LOCAL, operation="orders")
    def orders(request, op: SyncOperation):
        asked = said(request)
        world.runs.append("orders")
        order = Order.objects.create(item=asked["item"], tenant=tenant(request))
        assert op.connection is connections[alias]
        response = behave(alias, asked.get("does", ""))
        if response == "template":
            return TemplateResponse(request, "broken.html", {"order": order})
        if response == "render callback":
            late = SimpleTemplateResponse(engines["django"].from_string("draft"), status=201)
            late.add_post_render_callback(lambda _: late.headers.setdefault("Location", "/orders/5"))
            late.add_post_render_callback(lambda _: setattr(late, "content", b"final"))
            return late
        return response or JsonResponse({"item": order.item, "attempt": op.attempt}, status=201)

    @csrf_exempt
    @once.protect(effects=LOCAL, require_key=False, operation="optional")
    def optional(request, op: SyncOperation):
        Order.objects.create(item=said(request)["item"])
        response = behave(alias, said(request).get("does", ""))
        op.emit("note", {"of": "an order"})
        return response or JsonResponse({"key": op.key}, status=201)

    @csrf_exempt
    @once.protect(effects=LOCAL, operation="waiting", on_in_progress="wait", wait_max=60)
    def waiting(request):
        Order.objects.create(item=said(request)["item"])
        return behave(alias, said(request).get("does", "")) or JsonResponse({"ok": True}, status=201)

    @csrf_exempt
    @once.protect(effects=PHASED, operation="beating", lease=1, deadline=60)
    def beating(request, op: SyncOperation):
        """Stays until its lease was renewed twice, beside a phase that holds the request's own connection."""

        def renewed(_):
            seen: set[int] = set()
            other = connections.create_connection(alias)
            table = "oncekey.record" if connections[alias].vendor == "postgresql" else "oncekey_record"
            with contextlib.closing(other):
                while len(seen) < 3:
                    with other.cursor() as cursor:
                        cursor.execute(f"SELECT lease_until FROM {table} WHERE operation = 'beating'")
                        seen.add(cursor.fetchone()[0])
                    time.sleep(0.02)
            return len(seen)

        # SQLite has one writer, so a phase that writes would keep the heartbeat waiting.
        found = op.phase("renewed", renewed) if connections[alias].vendor == "postgresql" else renewed(None)
        return JsonResponse({"seen": found}, status=201)

    @csrf_exempt
    @once.protect(effects=LOCAL, require_key=False, operation="aoptional")
    async def aoptional(request, op: Operation):
        await Order.objects.acreate(item=said(request)["item"])
        op.emit("note", {"of": "an order"})
        if "does" in said(request):
            raise ZeroDivisionError
        return JsonResponse({"key": op.key}, status=201)

    @once.protect(effects=LOCAL, operation="upload", max_request_bytes=8_000_000)
    def upload(request):
        world.runs.append("upload")
        file = request.FILES["file"]
        Order.objects.create(item=file.name)
        return JsonResponse({"bytes": file.size}, status=201)

    class Things(View):
        @once.protect(effects=LOCAL)
        def post(self, request):
            Order.objects.create(item="a thing")
            return HttpResponse(b"made", status=201, content_type="text/plain")

        def get(self, request):
            return HttpResponse(b"things")

    @once.protect(effects=PHASED, operation="payments", complete=True)
    def payments(request, op: SyncOperation):
        asked = said(request)
        world.runs.append("payments")

        def begin(_):
            behave(alias, asked.get("in_phase", ""))
            return Payment.objects.create(amount=asked["amount"]).pk

        def charge(*, key):
            world.charges.append(key)
            Payment.objects.count()  # in a thread of its own, on a connection of its own
            if asked.get("does") == "not_executed":
                raise NotExecutedError
            return {"id": f"ch_{len(world.charges)}"}

        def settle(_, number, charge):
            Payment.objects.filter(pk=number).update(charge=charge)

        number = op.phase("begun", begin)
        if asked.get("does") == "wait":
            world.entered.release()
            assert world.go.wait(60)
        made = op.call("charged", charge, repeatable=True)
        if asked.get("does") == "fail_once" and op.attempt == 1:
            raise ZeroDivisionError
        op.phase("settled", settle, number, made["id"])
        return JsonResponse({"id": number, "charge": made["id"]}, status=201)

    @csrf_exempt
    @once.protect(effects=INLINE, operation="inline")
    def inline(request):
        world.runs.append("inline")
        Order.objects.create(item="inline")
        return behave(alias, said(request).get("does", "")) or JsonResponse({"done": True}, status=201)

    @csrf_exempt
    @once.protect(effects=OUTBOX, operation="shipments")
    def shipments(request, op: SyncOperation):
        Order.objects.create(item=said(request)["item"])
        op.defer("ship", {"item": said(request)["item"]})
        return HttpResponse(status=202)

    @once.topic("ship", repeatable=True)
    def ship(message):
        return {"shipped": message.payload["item"]}

    @once.topic("note")
    def note(message):
        world.hooks.append(message.payload["of"])

    @csrf_exempt
    def legacy(request, number):
        world.runs.append("legacy")
        return JsonResponse({"legacy": True}, status=201)

    @csrf_exempt
    @require_http_methods(["POST"])
    @login_required
    @once.protect(effects=LOCAL, operation="private")
    def private(request):
        return JsonResponse({"user": request.user.username}, status=201)

    # async

    @csrf_exempt
    @once.protect(effects=LOCAL, operation="aorders")
    async def aorders(request, op: Operation):
        asked = said(request)
        world.runs.append("aorders")
        order = await Order.objects.acreate(item=asked["item"])
        does = asked.get("does", "")
        if does == "slow":
            world.entered.release()
            await asyncio.sleep(asked["seconds"])
        elif does == "marked":  # it shows that it is there, and stays until the mark is taken away
            mark = Path(asked["mark"])
            mark.touch()  # noqa: ASYNC240
            while mark.exists():  # noqa: ASYNC110, ASYNC240  (the test is another process)
                await asyncio.sleep(0.01)
        elif does == "elsewhere":
            await sync_to_async(_aside, thread_sensitive=False)()
            raise ZeroDivisionError
        elif does:
            response = await sync_to_async(behave)(alias, does)
            if response is not None:
                return response
        return JsonResponse({"item": order.item}, status=201)

    @once.protect(effects=PHASED, operation="apayments", complete=True)
    async def apayments(request, op: Operation):
        asked = said(request)

        async def begin(_):
            return (await Payment.objects.acreate(amount=asked["amount"])).pk

        async def charge(*, key):
            world.charges.append(key)
            return {"id": f"ch_{len(world.charges)}"}

        def settle(_, number, charge):
            Payment.objects.filter(pk=number).update(charge=charge)

        number = await op.phase("begun", begin)
        made = await op.call("charged", charge, repeatable=True)
        if asked.get("does") == "fail_once" and op.attempt == 1:
            raise ZeroDivisionError
        await op.phase("settled", settle, number, made["id"])
        return JsonResponse({"id": number, "charge": made["id"]}, status=201)

    small = {"max_response_bytes": 10_000, "max_spool_bytes": 20_000}

    @csrf_exempt
    @once.protect(effects=LOCAL, operation="exports", **small)
    def exports(request):
        def rows():
            with transaction.atomic(using=alias):
                Order.objects.create(item="exported")
                while True:
                    yield b"x" * 1000
                    if "fails" in said(request):
                        raise ZeroDivisionError

        return StreamingHttpResponse(rows())

    @csrf_exempt
    @once.protect(effects=LOCAL, operation="aexports", **small)
    async def aexports(request):
        async def rows():
            block = transaction.atomic(using=alias)
            await sync_to_async(block.__enter__)()
            await Order.objects.acreate(item="exported")
            try:
                while True:
                    yield b"x" * 1000
                    if "fails" in said(request):
                        raise ZeroDivisionError
            finally:
                await sync_to_async(block.__exit__)(ZeroDivisionError, None, None)

        return StreamingHttpResponse(rows())

    @csrf_exempt
    @once.protect(effects=INLINE, operation="ainline")
    async def ainline(request):
        world.runs.append("ainline")

        async def pieces():
            for number in range(3):
                yield b"piece %d;" % number

        return StreamingHttpResponse(pieces(), status=201)

    # REST framework

    class Orders(viewsets.ModelViewSet):
        queryset = Order.objects.all()
        serializer_class = OrderSerializer
        permission_classes = (permissions.IsAuthenticated, IsOwner)

        @once.protect(effects=LOCAL)
        def create(self, request, *args, **kwargs):
            world.runs.append("create")
            return super().create(request, *args, **kwargs)

        def perform_create(self, serializer):
            serializer.save(owner=self.request.user.name, tenant=self.request.user.name)
            does = self.request.data.get("does", "")
            if does == "invalid":
                raise ValidationError({"item": "no"})
            behave(alias, does)

        @once.protect(effects=LOCAL)
        def destroy(self, request, *args, **kwargs):
            return super().destroy(request, *args, **kwargs)

        @action(detail=True, methods=["post"])
        @once.protect(effects=LOCAL)
        def pay(self, request, pk=None):
            order = self.get_object()
            Payment.objects.create(amount=order.pk)
            return Response({"paid": order.pk}, status=201)

    class Bookings(APIView):
        @once.protect(effects=LOCAL, operation="bookings")
        def post(self, request):
            world.runs.append("bookings")
            Order.objects.create(item=request.data["item"])
            if request.data.get("does") == "unserialisable":
                return Response({"what": object()}, status=201)
            if request.data.get("does") == "refused":
                return Response({"no": 1}, status=409)
            return Response({"item": request.data["item"]}, status=201)

    class Rare(Bookings):
        throttle_classes = (Twice,)

    @method_decorator(transaction.non_atomic_requests(using=alias), name="dispatch")
    class Charges(APIView):
        @once.protect(effects=PHASED, operation="charges")
        def post(self, request, op: SyncOperation):
            number = op.phase("begun", lambda _: Payment.objects.create(amount=1).pk)
            return Response({"id": number}, status=201)

    class Wrapped(APIView):
        """Not taken out of ATOMIC_REQUESTS."""

        @once.protect(effects=PHASED, operation="wrapped")
        def post(self, request, op: SyncOperation):
            number = op.phase("begun", lambda _: Payment.objects.create(amount=1).pk)
            return Response({"id": number}, status=201)

    @api_view(["POST"])
    @once.protect(effects=LOCAL, operation="by_function")
    def by_function(request):
        Order.objects.create(item=request.data["item"])
        return Response({"item": request.data["item"], "by": request.user.name}, status=201)

    @api_view(["POST"])
    @once.protect(effects=LOCAL, operation="authorised", authorise=lambda request: _only_ann(request))
    def authorised(request):
        return Response({"ok": True}, status=201)

    class Conforming(APIView):
        """What the tester of APIs is aimed at."""

        def get(self, request):
            return Response({"total": Order.objects.filter(tenant=request.user.name).count()})

        def check(self):
            """What cannot be valid is refused before the claim, so it may be mended under the same key."""
            OrderSerializer(data=self.request.data).is_valid(raise_exception=True)

        @once.protect(effects=LOCAL, operation="conforming", authorise=check)
        def post(self, request):
            serializer = OrderSerializer(data=request.data)
            serializer.is_valid(raise_exception=True)
            order = serializer.save(tenant=request.user.name)
            time.sleep(float(request.META.get("HTTP_X_SLOW", "0")))
            if "HTTP_X_FAIL" in request.META:
                raise ZeroDivisionError
            return Response({"id": order.pk, "item": order.item}, status=201, headers={"Location": f"/o/{order.pk}"})

    @csrf_exempt
    @once.protect(effects=LOCAL, operation="where")
    def where(request):
        Order.objects.create(item=said(request)["item"])
        raw = connections[alias].connection
        backend = raw.info.backend_pid if alias == "default" and hasattr(raw, "info") else None
        return JsonResponse({"pid": os.getpid(), "backend": backend}, status=201)

    @csrf_exempt
    def spied(request):
        """What a view sees that is not protected."""
        return JsonResponse({"body": request.body.decode()})

    router = DefaultRouter()
    router.register("rest/orders", Orders)
    urls = [
        path("orders", orders),
        path("optional", optional),
        path("waiting", waiting),
        path("beating", beating),
        path("aoptional", aoptional),
        path("upload", upload),
        path("upload-exempt", csrf_exempt(upload)),
        path("things", csrf_exempt(Things.as_view())),
        path("payments", csrf_exempt(payments)),
        path("payments-of-forms", payments),
        path("inline", inline),
        path("shipments", shipments),
        path("legacy/<int:number>", legacy),
        path("private", private),
        path("aorders", aorders),
        path("apayments", csrf_exempt(apayments)),
        path("apayments-of-forms", apayments),
        path("ainline", ainline),
        path("exports", exports),
        path("aexports", aexports),
        path("rest/bookings", Bookings.as_view()),
        path("rest/rare", Rare.as_view()),
        path("rest/charges", Charges.as_view()),
        path("rest/wrapped", Wrapped.as_view()),
        path("rest/by-function", by_function),
        path("rest/authorised", authorised),
        path("spied", spied),
        path("where", where),
        path("rest/conforming", Conforming.as_view()),
        path("idempotency-keys/<path:key>", once.status_view),
        path("idempotency", once.docs_view),
        path("schema", SpectacularAPIView.as_view(permission_classes=[], authentication_classes=[])),
        path("admin/", admin.site.urls),
        path("", include(router.urls)),
    ]
    return once, urls


def _only_ann(request) -> None:
    if world.owners.get("authorised", "ann") != request.user.name:
        raise PermissionDenied
