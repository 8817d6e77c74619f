"""Short names for what all tests of DynamoDB share."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("oncekey_contract")


@pytest.fixture(scope="session")
def clients(dynamo_clients):
    return dynamo_clients


@pytest.fixture(scope="session")
def new_table(dynamo_table):
    return dynamo_table
