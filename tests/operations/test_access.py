"""Brokers that operators work on."""

from __future__ import annotations

import pytest

from mqtemplate.broker import Broker
from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.errors import UnsupportedError
from mqtemplate.operations import BrokerAccess


class BrokerOfAUser(EmbeddedBroker):
    """A broker that has written no administration."""

    admin = Broker.admin


def test_a_broker_without_administration_says_what_to_do() -> None:
    with BrokerOfAUser() as broker, pytest.raises(UnsupportedError) as refused:
        BrokerAccess(broker).admin.topics()

    assert str(refused.value) == (
        "broker 'broker-a', a BrokerOfAUser, does not list its topics and groups: implement Broker.admin, or turn off "
        "what shows them (mqtemplate.management.dashboard.enabled)"
    )
