"""A real Galera cluster of three nodes on loopback: one key on two primaries, and a node that is killed."""

from __future__ import annotations

import threading
from contextlib import ExitStack, closing

import pymysql
import pytest

from harness.mariadb import MariadbServer, migrated
from harness.patience import PATIENCE, wait_until
from harness.ports import free_port
from local.databases import lock_for
from oncekey.core.errors import StoreError
from oncekey.core.flow import drive
from oncekey.core.model import Completed, Outcome, StoredResponse
from oncekey.core.onecommit import WriteKind, WriteTarget
from oncekey.databases.mariadb.diagnostics import server as mariadb
from oncekey.databases.mariadb.generated.pymysql import PymysqlDriver
from oncekey.databases.mariadb.store import MariadbStore
from oncekey.ops.doctor import Level
from oncekey.testing.claims import a_claim

ANSWER = Completed(StoredResponse(201, (), b"{}"), Outcome.SUCCESS)
ROUNDS = 10


@pytest.fixture
def nodes():
    """Three nodes that are one cluster; the last two copy the first one by rsync."""
    with ExitStack() as stack:
        servers = [stack.enter_context(_Node()) for _ in range(3)]
        members = ",".join(f"127.0.0.1:{server.base}" for server in servers)
        for number, server in enumerate(servers):
            server.kill()
            server.launch(*server.options(members), *(["--wsrep-new-cluster"] if number == 0 else []))
            server.await_serving(3 * PATIENCE)
            wait_until(lambda server=server: server.status("wsrep_ready") == "ON")
        wait_until(lambda: servers[0].status("wsrep_cluster_size") == "3")
        yield servers


class _Node(MariadbServer):
    def __init__(self):
        super().__init__({"binlog-format": "ROW", "innodb-autoinc-lock-mode": "2"})
        self.base, self._ist, self._sst = free_port(), free_port(), free_port()

    def options(self, members):
        provider = (
            f"base_host=127.0.0.1;base_port={self.base};gmcast.listen_addr=tcp://127.0.0.1:{self.base};"
            f"ist.recv_addr=127.0.0.1:{self._ist};gcache.size=8M;evs.suspect_timeout=PT1S;evs.inactive_timeout=PT3S;"
            "evs.keepalive_period=PT0.3S;evs.inactive_check_period=PT0.3S;pc.wait_prim=no"
        )
        return (
            "--wsrep-on=ON",
            f"--wsrep-provider={self.installation.galera}",
            "--wsrep-cluster-name=oncekey",
            f"--wsrep-cluster-address=gcomm://{members}",
            f"--wsrep-node-address=127.0.0.1:{self.base}",
            f"--wsrep-sst-receive-address=127.0.0.1:{self._sst}",
            "--wsrep-sst-method=rsync",
            f"--wsrep-provider-options={provider}",
        )

    def status(self, name):
        found = self.say(f"SHOW GLOBAL STATUS LIKE '{name}'")
        return found[0][1] if found else None


def test_galera_executes_a_key_once_and_survives_a_killed_node(nodes):
    """R62, R71: certification lets one of two commit, with its business row; the other hears it as a conflict."""
    store = MariadbStore()
    migrated(nodes[0].create_database("shop"))
    nodes[0].say("CREATE TABLE effect (id BIGINT AUTO_INCREMENT PRIMARY KEY, item VARCHAR(64))", "shop")
    with ExitStack() as stack:
        drivers = [stack.enter_context(closing(PymysqlDriver(node.url("shop")))) for node in nodes[:2]]
        start = threading.Barrier(2)
        ended: list[tuple[int, str]] = []

        def requests(driver):
            for turn in range(ROUNDS):
                claim = a_claim(f"both-{turn}")
                start.wait(PATIENCE)
                tx = driver.begin()
                try:
                    look = tx.run(store.locks.locking(lock_for(claim), claim))
                    if not look.got or look.snapshot.record is not None:
                        ended.append((turn, "refused"))
                        continue
                    with tx.connection.cursor() as cursor:
                        cursor.execute("INSERT INTO effect (item) VALUES (%s)", (f"both-{turn}",))
                    if tx.run(store.locks.completing(claim, WriteTarget(WriteKind.NEW), ANSWER, look.begun)) is None:
                        ended.append((turn, "taken"))
                        continue
                    tx.commit()
                    ended.append((turn, "done"))
                except (StoreError, pymysql.MySQLError) as error:
                    ended.append((turn, type(error).__name__))
                finally:
                    tx.rollback()

        threads = [threading.Thread(target=requests, args=(driver,)) for driver in drivers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(turn for turn, how in ended if how == "done") == list(range(ROUNDS)), ended
        seen = "SELECT count(*), count(DISTINCT item) FROM effect"
        wait_until(lambda: nodes[2].say(seen, "shop") == ((ROUNDS, ROUNDS),))
        # The claim of another effect races in the same way: one owner, whoever asks.
        claims = [a_claim("claimed"), a_claim("claimed")]
        owners = [drive(store.claim(claim), driver.run).record for claim, driver in zip(claims, drivers, strict=True)]
        assert owners[0] == owners[1]

        found = drive(store.operate.diagnostics(), drivers[0].run)
        said = list(mariadb(found["diagnostic_server"], found["diagnostic_cluster"]))
        assert any(one.level is Level.WARNING and "Galera cluster of 3" in one.seen for one in said)

        nodes[2].kill()
        claim = a_claim("after-the-kill")

        def written():
            try:
                return drive(store.claim(claim), drivers[1].run).record is not None
            except StoreError:
                return False

        wait_until(written)
        wait_until(lambda: drive(store.find(claim.id), drivers[0].run).record is not None)  # the other node follows
