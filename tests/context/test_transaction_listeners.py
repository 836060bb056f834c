"""An application builds transaction listeners and adds them to its template."""

from __future__ import annotations

import pytest

from mqtemplate import (
    Broker,
    MQApplication,
    RocketMQTemplate,
    TransactionState,
    VirtualClock,
    service,
    transaction_listener,
)
from mqtemplate.errors import ConfigurationError, DependencyError, ListenerError
from mqtemplate.message import Message, MessageExt
from mqtemplate.testing import Harness, messages_in

SETTINGS = {"rocketmq.name-server": "embedded:memory", "rocketmq.producer.group": "shop"}


@service
class Ledger:
    def __init__(self) -> None:
        self.entries: list[object] = []


@transaction_listener()
class OrderTransactions:
    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def execute_local_transaction(self, message: Message, arg: object) -> TransactionState:
        self.ledger.entries.append(arg)
        return TransactionState.UNKNOWN

    def check_local_transaction(self, message: MessageExt) -> TransactionState:
        return TransactionState.COMMIT if self.ledger.entries else TransactionState.ROLLBACK


def test_a_listener_is_built_by_the_types_of_its_constructor_and_answers_checks() -> None:
    with MQApplication(Ledger, OrderTransactions, settings=SETTINGS, clock=VirtualClock()) as app:
        result = app.template.send_in_transaction("orders", b"order", arg="invoice 7")
        Harness(app).advance("6s")

        assert app.get(Ledger).entries == ["invoice 7"]
        assert [message.msg_id for message in messages_in(app.broker, "orders")] == [result.msg_id]


def test_a_module_is_searched_for_listeners() -> None:
    with MQApplication(__name__, settings=SETTINGS, clock=VirtualClock()) as app:
        app.template.send_in_transaction("orders", b"order", arg="invoice 7")

        assert app.get(Ledger).entries == ["invoice 7"]


def test_a_transaction_listener_without_a_producer_group_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigurationError, match=r"on .*OrderTransactions: .*rocketmq\.producer\.group"):
        MQApplication(
            Ledger, OrderTransactions, settings={"rocketmq.name-server": "embedded:memory"}, clock=VirtualClock()
        ).start()


def test_a_listener_names_its_template_where_there_are_several() -> None:
    """Spring's ``rocketMQTemplateBeanName``. The default selects the template with the name "template"."""

    @service(name="template")
    def own_template(broker: Broker) -> RocketMQTemplate:
        return RocketMQTemplate(broker, producer_group="own")

    @service(name="audit_template")
    def audit_template(broker: Broker) -> RocketMQTemplate:
        return RocketMQTemplate(broker, producer_group="audit")

    @transaction_listener(rocketmq_template_bean_name="auditTemplate")
    class AuditTransactions(OrderTransactions): ...

    components = (Ledger, own_template, audit_template, AuditTransactions, OrderTransactions)
    with MQApplication(*components, settings={"rocketmq.name-server": "embedded:memory"}, clock=VirtualClock()) as app:
        app.template.send_in_transaction("orders", b"order", arg=1)
        app.get(RocketMQTemplate, "audit_template").send_in_transaction("orders", b"order", arg=2)
        Harness(app).advance("6s")

        groups = {message.properties["PGROUP"] for message in messages_in(app.broker, "orders")}
        assert (groups, app.get(Ledger).entries) == ({"own", "audit"}, [1, 2])


def test_an_unknown_template_is_an_error() -> None:
    @transaction_listener(rocketmq_template_bean_name="auditTemplate")
    class AuditTransactions(OrderTransactions): ...

    with pytest.raises(
        DependencyError, match=r"AuditTransactions: there is no template 'auditTemplate' \(there is: only the app"
    ):
        MQApplication(Ledger, AuditTransactions, settings=SETTINGS, clock=VirtualClock()).start()


def test_two_listeners_without_a_destination_are_refused_at_the_start() -> None:
    @transaction_listener()
    class Second(OrderTransactions): ...

    with pytest.raises(ListenerError, match="have a listener already"):
        MQApplication(Ledger, OrderTransactions, Second, settings=SETTINGS, clock=VirtualClock()).start()
