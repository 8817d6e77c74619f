"""The project of the guide to Django does what the page says, in processes of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from harness.pages import ROOT, Page
from harness.patience import PATIENCE
from harness.tables import leases_run_out

PAGE = Page(ROOT / "docs/howto/django.md")
DATABASE = "db.sqlite3"
ASKING = """
import django, json
django.setup()
from django.contrib.auth.models import User
from django.test import Client
from base64 import b64encode
User.objects.create_user("ann", password="secret")
token = "Basic " + b64encode(b"ann:secret").decode()
client = Client(SERVER_NAME="127.0.0.1")
def ask(path, body, key):
    headers = {"Authorization": token, "Idempotency-Key": key}
    answer = client.post(path, body, content_type="application/json", headers=headers)
    return [answer.status_code, answer.json(), answer.headers.get("Idempotent-Replayed")]
said = [ask("/orders/", {"product": "tea"}, "7e0f5b1c-3a52-4c1e-9d87-2f6b80a4c913") for _ in range(2)]
said += [ask("/orders/1/rename/", {"product": "milk"}, "b54d0c67-91fe-4a3b-8c20-6a1d7e53f0b8") for _ in range(2)]
said += [ask("/payments", {"amount": 5}, "0c8e64f1-5d27-4b9a-a36e-91f20d7b45ce") for _ in range(2)]
print(json.dumps([said, client.post("/orders/", {"product": "tea"}).status_code]))
"""
USER = 'User.objects.create_user("ann", email="ann@example.com", password="secret")'
DEACTIVATED = 'User.objects.filter(username="ann").update(is_active=False)'
DELETED = 'User.objects.filter(username="ann").delete()'
RESTORED = 'User.objects.create(pk=1, username="ann", email="ann@example.com", is_active=False)'
PAYING = """
import django, os, signal, sys
django.setup()
from shop import views
charge = views.charge
path, login, end = sys.argv[1:]
def counted(amount, key):
    made = charge(amount, key=key)
    with open("charges", "a") as file:
        file.write(key + chr(10))
    if end == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    return made
views.charge = counted
from base64 import b64encode
from django.contrib.auth.models import User
from django.middleware.csrf import _get_new_csrf_string
from django.test import Client
client = Client(enforce_csrf_checks=True, SERVER_NAME="127.0.0.1")
headers = {"Idempotency-Key": "payment-of-ann-7e0f5b1c"}
if login == "session":
    client.force_login(User.objects.get(username="ann"))
    client.cookies["csrftoken"] = headers["X-CSRFToken"] = _get_new_csrf_string()
else:
    headers["Authorization"] = "Basic " + b64encode(b"ann:secret").decode()
answer = client.post(path, {"amount": 7}, content_type="application/json", headers=headers)
print(answer.status_code, answer.content.decode(), answer.headers.get("Idempotent-Replayed"))
"""
CHECKOUT = """
import json
from django.contrib.auth.decorators import login_required
from django.http import JsonResponse
from oncekey import PHASED, Operation, SyncOperation
from shop import views
from shop.once import once

@login_required
@once.protect(effects=PHASED)
def checkout(request, op: SyncOperation):
    amount = json.loads(request.body)["amount"]
    payment_id = op.phase("created", views.begin, amount)
    charged = op.call("charged", views.charge, amount, repeatable=True)
    op.phase("settled", views.settle, op, payment_id, charged["id"], request.user.email)
    return JsonResponse({"id": payment_id, "charge": charged["id"]}, status=201)

async def begin(connection, amount):
    return (await views.Payment.objects.acreate(amount=amount)).pk

async def charge(amount, *, key):
    return views.charge(amount, key=key)

async def settle(connection, payment_id, charge_id):
    await views.Payment.objects.filter(pk=payment_id).aupdate(charge=charge_id)

@login_required
@once.protect(effects=PHASED)
async def checkout_async(request, op: Operation):
    amount = json.loads(request.body)["amount"]
    payment_id = await op.phase("created", begin, amount)
    charged = await op.call("charged", charge, amount, repeatable=True)
    await op.phase("settled", settle, payment_id, charged["id"])
    return JsonResponse({"id": payment_id, "charge": charged["id"]}, status=201)
"""
RESUMING = """

class Resuming(TransactionTestCase):
    def test_a_worker_completes_the_payment(self):
        from unittest.mock import patch
        get_user_model().objects.create_user("ann", "ann@example.com", "secret")
        client, key = APIClient(raise_request_exception=False), str(uuid4())
        headers = {"Idempotency-Key": key, "Authorization": "Basic YW5uOnNlY3JldA=="}  # ann:secret
        with patch("shop.views.charge", side_effect=[TimeoutError, {"id": "ch_1"}]):
            self.assertEqual(client.post("/payments", {"amount": 5}, headers=headers).status_code, 500)
            call_command("oncekey", "worker", "--once", stdout=StringIO())
        again = client.post("/payments", {"amount": 5}, headers=headers)
        self.assertEqual((again.status_code, again.headers.get("Idempotent-Replayed")), (201, "true"))
"""
WORKING = """
import django
django.setup()
from shop import views
charge = views.charge
def counted(amount, key):
    with open("charges", "a") as file:
        file.write(key + chr(10))
    return charge(amount, key=key)
views.charge = counted
from django.core.management import execute_from_command_line as run
run(["manage.py", "oncekey", "worker", "--once"])
"""
STATUS = """
import django, json
django.setup()
from base64 import b64encode
from django.contrib.auth.models import User
from django.test import Client
User.objects.create_user("bob", password="secret")
def ask(name):
    token = "Basic " + b64encode((name + ":secret").encode()).decode()
    client, headers = Client(SERVER_NAME="127.0.0.1"), {"Authorization": token} if name else {}
    return client.get("/idempotency-keys/payment-of-ann-7e0f5b1c", headers=headers)
print(json.dumps([[one.status_code, one.json()] for one in map(ask, ["ann", "bob", ""])]))
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A new project with the files of the page."""
    run(tmp_path, "-m", "django", "startproject", "shop", ".")
    files = [block for block in PAGE.blocks("python") if block.file is not None]
    assert len(files) == len(PAGE.blocks("python")) == 9
    for block in files:
        block.save(tmp_path)
    return tmp_path


def run(folder: Path, *command: str, code: int = 0) -> str:
    environ = {**os.environ, "DJANGO_SETTINGS_MODULE": "shop.settings"}
    environ["PYTHONPATH"] = os.pathsep.join([str(folder), str(ROOT / "src"), str(ROOT / "tests")])
    said = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert said.returncode == code, said.stdout + said.stderr
    return said.stderr + said.stdout


def migrate(project: Path) -> None:
    """The page's own models have no migrations yet."""
    run(project, "manage.py", "migrate", "--run-syncdb", "--verbosity", "0")


def with_users(project: Path, *statements: str) -> None:
    run(
        project,
        "-c",
        "\n".join(["import django; django.setup()", "from django.contrib.auth.models import User", *statements]),
    )


def payments(project: Path) -> list[tuple[int, str]]:
    with closing(sqlite3.connect(project / DATABASE)) as connection:
        return connection.execute("SELECT amount, charge FROM shop_payment").fetchall()


def edit(project: Path, file: str, text: str, instead: str) -> None:
    path = project / "shop" / f"{file}.py"
    assert text in path.read_text()
    path.write_text(path.read_text().replace(text, instead))


def test_django_guide_project_works_as_described(project: Path) -> None:
    migrate(project)
    assert "no issues" in run(project, "manage.py", "check")
    said, nobody = json.loads(run(project, "-c", ASKING).splitlines()[-1])
    order, renamed, paid = {"id": 1, "product": "tea"}, {"id": 1, "product": "milk"}, {"id": 1, "charge": "ch_1"}
    assert said[:2] == [[201, order, None], [201, order, "true"]]
    assert said[2:4] == [[200, renamed, None], [200, renamed, "true"]]
    assert said[4:] == [[201, paid, None], [201, paid, "true"]]
    assert nobody == 401


def test_worker_completes_a_django_payment_whose_process_was_killed(
    project: Path,
) -> None:
    migrate(project)
    with_users(project, USER)
    run(project, "-c", PAYING, "/payments", "basic", "die", code=-signal.SIGKILL)
    leases_run_out(f"sqlite:///{project}/{DATABASE}")
    mine, others, nobody = json.loads(run(project, "-c", STATUS).splitlines()[-1])
    assert (mine[0], mine[1]["state"], others[0], nobody[0]) == (200, "in_progress", 404, 401)

    run(project, "-c", WORKING)
    assert payments(project) == [(7, "ch_1")]
    assert len(set((project / "charges").read_text().split())) == 1, "the worker repeats the call with the same key"
    paid = run(project, "-c", PAYING, "/payments", "basic", "live").splitlines()[-1]
    assert paid == '201 {"id":1,"charge":"ch_1"} true'


@pytest.mark.parametrize("path", ["/payments", "/checkout", "/checkout-async"])
def test_worker_completes_views_with_session_login_and_csrf_check(project: Path, path: str) -> None:
    (project / "shop" / "checkout.py").write_text(CHECKOUT)
    routes = 'path("checkout", checkout), path("checkout-async", checkout_async),'
    urls = f"from shop.checkout import checkout, checkout_async\n\nurlpatterns = [\n    {routes}"
    edit(project, "urls", "urlpatterns = [", urls)
    edit(
        project,
        "settings",
        '"shop.once.Resumed",',
        '"rest_framework.authentication.SessionAuthentication", "shop.once.Resumed",',
    )
    assert "oncekey.W004) checkout has effects=PHASED" in run(project, "manage.py", "check")
    (addition,) = re.findall(r'MIDDLEWARE \+= \["shop.*\]', PAGE.text)
    above = addition.replace('"shop.middleware.ResumedUser", ', "")
    edit(
        project,
        "settings",
        'MIDDLEWARE += ["oncekey.django.Middleware"]',
        f'MIDDLEWARE.insert(0, "shop.middleware.ResumedUser")\n{above}',
    )
    assert "oncekey.W007) shop.middleware.ResumedUser calls oncekey.resumed_as" in run(project, "manage.py", "check")
    edit(project, "settings", f'MIDDLEWARE.insert(0, "shop.middleware.ResumedUser")\n{above}', addition)
    assert "no issues" in run(project, "manage.py", "check")
    migrate(project)
    with_users(project, USER)
    run(project, "-c", PAYING, path, "session", "die", code=-signal.SIGKILL)
    leases_run_out(f"sqlite:///{project}/{DATABASE}")
    run(project, "-c", WORKING)
    assert payments(project) == [(7, "ch_1")]
    assert run(project, "-c", PAYING, path, "session", "live").splitlines()[-1].endswith("true")


@pytest.mark.parametrize(
    ("of_project", "of_view", "login", "admitted"),
    [
        (("BasicAuthentication",), None, "basic", False),
        (("BasicAuthentication", "TokenAuthentication"), None, "basic", False),
        (("SessionAuthentication",), "BasicAuthentication", "basic", False),
        (("BasicAuthentication", "SessionAuthentication"), None, "basic", True),
        (("SessionAuthentication",), None, "session", True),
        (("BasicAuthentication",), "SessionAuthentication", "session", True),
    ],
)
def test_middleware_for_workers_is_enough_where_rest_framework_takes_its_user(
    project: Path, of_project: tuple[str, ...], of_view: str | None, login: str, admitted: bool
) -> None:
    classes = "".join(f'"rest_framework.authentication.{name}",' for name in of_project)
    edit(project, "settings", '"rest_framework.authentication.BasicAuthentication",', classes)
    edit(project, "settings", '"shop.once.Resumed",', "")
    (addition,) = re.findall(r'MIDDLEWARE \+= \["shop.*\]', PAGE.text)
    edit(project, "settings", 'MIDDLEWARE += ["oncekey.django.Middleware"]', addition)
    if of_view is not None:
        imports = f"from rest_framework.authentication import {of_view}\nfrom rest_framework.decorators import"
        edit(project, "views", "from rest_framework.decorators import", f"{imports} authentication_classes,")
        above = f'@api_view(["POST"])\n@authentication_classes([{of_view}])\n@once.protect(effects=PHASED)'
        edit(project, "views", '@api_view(["POST"])\n@once.protect(effects=PHASED)', above)
    said = run(project, "manage.py", "check")
    assert ("no issues" in said, "oncekey.W004) pay has effects=PHASED" in said) == (admitted, not admitted)

    migrate(project)
    with_users(project, USER)
    run(project, "-c", PAYING, "/payments", login, "die", code=-signal.SIGKILL)
    leases_run_out(f"sqlite:///{project}/{DATABASE}")
    worked = run(project, "-c", WORKING, code=0 if admitted else 1)
    assert payments(project) == [(7, "ch_1" if admitted else "")]
    assert ("a completer's request for pay received 401" in worked) != admitted


def test_worker_completes_payments_of_deactivated_users_but_not_of_deleted_ones(project: Path) -> None:
    migrate(project)
    with_users(project, USER)
    run(project, "-c", PAYING, "/payments", "basic", "die", code=-signal.SIGKILL)
    leases_run_out(f"sqlite:///{project}/{DATABASE}")
    with_users(project, DELETED)
    refused = run(project, "-c", WORKING, code=1)
    assert "a completer's request for pay received 401 before its handler was called" in refused
    listed = run(project, "manage.py", "oncekey", "keys", "list", "--state", "failed_retryable", "--effects", "phased")
    assert "payment-of-ann-7e0f5b1c" in listed
    assert "resumable: 1" in run(project, "manage.py", "oncekey", "doctor", "--workers", "0")
    assert payments(project) == [(7, "")]

    with_users(project, RESTORED)
    run(project, "-c", WORKING)
    assert payments(project) == [(7, "ch_1")], "the user is inactive, and was active when the payment began"


def test_worker_is_not_redirected_to_https(project: Path) -> None:
    header = 'SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https")'
    edit(project, "settings", 'ONCEKEY = "', f'SECURE_SSL_REDIRECT = True\n{header}\nONCEKEY = "')
    migrate(project)
    with_users(project, USER)
    behind_a_proxy = PAYING.replace("headers = {", 'headers = {"X-Forwarded-Proto": "https", ')
    run(project, "-c", behind_a_proxy, "/payments", "basic", "die", code=-signal.SIGKILL)
    leases_run_out(f"sqlite:///{project}/{DATABASE}")
    run(project, "-c", WORKING)
    assert payments(project) == [(7, "ch_1")]


def test_messages_of_a_django_topic_that_is_not_imported_wait(project: Path) -> None:
    migrate(project)
    with_users(project, USER)
    apps = project / "shop" / "apps.py"
    registered = apps.read_text()
    apps.write_text("")
    run(project, "-c", PAYING, "/payments", "basic", "live")
    worked = run(project, "manage.py", "oncekey", "--log", "worker", "--once")
    assert ("0 done" in worked, "topics receipt" in worked) == (True, False)
    assert re.search(r"receipt +emit +1", run(project, "manage.py", "oncekey", "stats"))
    doctor = ["manage.py", "oncekey", "doctor", "--workers", "0", "--due-after", "0"]
    diagnosis = run(project, *doctor, code=1)
    assert "parcels due: 1" in diagnosis
    assert "-> run `manage.py oncekey worker`, with a function for each topic" in diagnosis

    apps.write_text(registered)
    worked = run(project, "manage.py", "oncekey", "worker", "--once")
    assert ("topics receipt" in worked, "To: ann@example.com" in worked, "You paid 7." in worked) == (True, True, True)


def test_tests_of_the_guide_pass(project: Path) -> None:
    assert "Ran 3 tests" in run(project, "manage.py", "test")
    edit(project, "tests", "class Requests(TransactionTestCase)", "class Requests(TestCase)")
    assert "relay: the store did not respond (StoreBusyError)" in run(project, "manage.py", "test", code=1)


def test_a_worker_completes_a_payment_in_a_django_test(project: Path) -> None:
    """Django's test client sends no Host, and its test runner accepts no other one than its own."""
    edit(project, "once", "Once(", "Once(policy=Policy(complete_interval=0.01), ")
    edit(project, "once", "import Once", "import Once\nfrom oncekey import Policy")
    with (project / "shop" / "tests.py").open("a") as file:
        file.write(RESUMING)
    assert "Ran 1 test" in run(project, "manage.py", "test", "shop.tests.Resuming")


def test_django_routes_omit_the_forms_of_the_admin_site(project: Path) -> None:
    assert "admin.site.urls" not in (project / "shop" / "urls.py").read_text()
    edit(
        project,
        "urls",
        "urlpatterns = [",
        'from django.contrib import admin\nurlpatterns = [\n    path("admin/", admin.site.urls),',
    )
    listed = run(project, "manage.py", "oncekey", "routes", code=1)
    assert ("/orders/{pk}/" in listed, "/admin" in listed) == (True, False)


@pytest.mark.parametrize(
    ("without", "instead", "finding"),
    [
        (
            '        "shop.once.Resumed",\n',
            "",
            "oncekey.W004) pay has effects=PHASED, and a worker that resumes",
        ),
        ("user_id = resumed_as(request)", "user_id = None", "oncekey.W004) pay has effects=PHASED"),
        (
            'key>", key_status)',
            'key>", once.status_view)',
            "oncekey.W005) once.status_view is routed directly",
        ),
        (
            '    path("idempotency-keys/<path:key>", key_status),\n',
            "",
            "oncekey.W006) status='/idempotency-keys'",
        ),
    ],
)
def test_django_check_reports_the_warnings_of_the_guide(
    project: Path, without: str, instead: str, finding: str
) -> None:
    for file in ("settings", "once", "urls"):
        path = project / "shop" / f"{file}.py"
        path.write_text(path.read_text().replace(without, instead))
    if "once.status_view" in instead:
        urls = project / "shop" / "urls.py"
        urls.write_text("from shop.once import once\n" + urls.read_text())
    said = run(project, "manage.py", "check")
    assert finding in said
    assert said.count("oncekey.W") == 1
