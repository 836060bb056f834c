"""Several templates in one application: named sections, decorated classes, injection by name, errors at the start."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Annotated, Any

import pytest

from mqtemplate import (
    Broker,
    EmbeddedBroker,
    MessageExt,
    MQApplication,
    Named,
    Outgoing,
    RateLimit,
    RocketMQTemplate,
    TransactionState,
    VirtualClock,
    ext_consumer,
    ext_template,
    message_listener,
    middleware,
    service,
    transaction_listener,
)
from mqtemplate.errors import ConfigurationError, DependencyError, ListenerError, UnsupportedError
from mqtemplate.message import Message
from mqtemplate.testing import Harness, messages_in

pytestmark = pytest.mark.feature("templates")

IN_MEMORY = {"rocketmq.name-server": "embedded:memory"}
AUDIT = {**IN_MEMORY, "rocketmq.templates.audit.name-server": "embedded:memory"}


def app_of(*components: object, settings: dict[str, object], **options: object) -> MQApplication:
    return MQApplication(*components, settings=settings, environment={}, clock=VirtualClock(), **options)  # type: ignore[arg-type]


@service
class Shop:
    def __init__(self, template: RocketMQTemplate, audit: Annotated[RocketMQTemplate, Named("audit")]) -> None:
        self.template, self.audit = template, audit


# --- injection -----------------------------------------------------------------------------------


def test_a_template_of_the_configuration_is_injected_by_its_name() -> None:
    """It sends to a broker of its own: the application's broker does not have the message."""
    with app_of(Shop, settings=AUDIT) as app:
        shop = app.get(Shop)
        shop.audit.sync_send("entries", "login")
        shop.template.sync_send("orders", "book")

        assert [each.body for each in messages_in(app.get(Broker, "audit"), "entries")] == [b"login"]  # type: ignore[type-abstract]
        assert [each.body for each in messages_in(app.broker, "orders")] == [b"book"]
        assert messages_in(app.broker, "entries") == []
        assert list(app.brokers) == ["broker", "audit"]


def test_a_parameter_of_that_name_gets_the_template_too() -> None:
    class Audit:
        def __init__(self, audit: RocketMQTemplate, other: RocketMQTemplate) -> None:
            self.templates = (audit, other)

    with app_of(Audit, settings=AUDIT) as app:
        assert app.get(Audit).templates == (app.get(RocketMQTemplate, "audit"), app.template)


def test_all_templates_are_injected_as_a_list() -> None:
    class Report:
        def __init__(self, templates: list[RocketMQTemplate]) -> None:
            self.templates = templates

    with app_of(Report, settings=AUDIT) as app:
        assert app.get(Report).templates == [app.template, app.get(RocketMQTemplate, "audit")]


def test_a_named_annotation_chooses_among_services_too() -> None:
    class Store:
        def __init__(self, place: str = "") -> None:
            self.place = place

    @service(name="backup_store")
    def backup() -> Store:
        return Store("backup")

    @service(name="main_store")
    def main() -> Store:
        return Store("main")

    class Reader:
        def __init__(self, store: Annotated[Store, Named("backupStore")]) -> None:
            self.store = store

    # Classes of a test function are not known to annotations by name.
    for part in (backup, main):
        part.__annotations__["return"] = Store
    Reader.__init__.__annotations__["store"] = Annotated[Store, Named("backupStore")]
    with app_of(backup, main, Reader, settings=IN_MEMORY) as app:
        assert app.get(Reader).store.place == "backup"


def test_a_template_takes_limits_of_the_producer_that_it_does_not_set() -> None:
    settings = {
        **AUDIT,
        "rocketmq.producer.send-message-timeout": "7s",
        "rocketmq.producer.max-message-size": 4,
        "rocketmq.templates.audit.max-message-size": 5,
    }
    with app_of(Shop, settings=settings) as app:
        audit = app.get(Shop).audit

        assert audit.send_message_timeout == 7_000
        audit.sync_send("entries", b"12345")


# --- decorated classes ---------------------------------------------------------------------------


def test_a_class_is_a_template_with_the_keys_of_its_section() -> None:
    @ext_template("audit")
    class AuditTemplate(RocketMQTemplate): ...

    class Shop:
        def __init__(self, by_type: AuditTemplate, by_name: Annotated[RocketMQTemplate, Named("audit")]) -> None:
            self.templates = (by_type, by_name)

    with app_of(AuditTemplate, Shop, settings=AUDIT) as app:
        by_type, by_name = app.get(Shop).templates

        assert by_type is by_name
        assert type(by_type) is AuditTemplate
        assert by_type.broker is app.brokers["audit"]


def test_the_attributes_of_a_class_may_hold_placeholders_and_the_configuration_wins() -> None:
    @ext_template(name_server="${audit.server}", group="audit", send_message_timeout="9s", max_message_size=-1)
    class AuditTemplate(RocketMQTemplate): ...

    settings = {**IN_MEMORY, "audit.server": "embedded:memory", "rocketmq.templates.audit_template.group": "auditors"}
    with app_of(AuditTemplate, settings=settings) as app:
        template = app.get(AuditTemplate)

        assert template.send_message_timeout == 9_000
        assert template.broker is not app.broker
        assert template._transactions._group == "auditors"


def test_a_class_may_have_its_own_subscription() -> None:
    """`receive` of each template reads for a group of its own, here from the application's broker."""

    @ext_consumer(group="auditors", topic="entries", selector_expression="login")
    class AuditReader(RocketMQTemplate): ...

    with app_of(AuditReader, settings=IN_MEMORY) as app:
        app.template.sync_send("entries:login", "7")
        app.template.sync_send("entries:logout", "8")

        assert app.get(AuditReader).receive(str, timeout=0) == ["7"]


def test_modules_are_searched_for_classes() -> None:
    import types

    module = types.ModuleType("shop_templates")

    @ext_template(group="audit")
    class AuditTemplate(RocketMQTemplate): ...

    AuditTemplate.__module__ = "shop_templates"
    module.AuditTemplate = AuditTemplate  # type: ignore[attr-defined]

    with app_of(module, settings=IN_MEMORY) as app:
        assert app.get(AuditTemplate).broker is app.broker


# --- several stores ------------------------------------------------------------------------------


def test_templates_of_two_folders_have_two_stores_that_survive(tmp_path: Path) -> None:
    settings = {
        "rocketmq.name-server": f"embedded:{tmp_path / 'shop'}",
        "rocketmq.templates.audit.name-server": f"embedded:{tmp_path / 'audit'}",
    }
    with app_of(Shop, settings=settings) as app:
        app.get(Shop).audit.sync_send("entries", "login", delay="1h")

    with app_of(Shop, settings=settings) as app:
        Harness(app).advance("2h")

        assert [each.body for each in messages_in(app.brokers["audit"], "entries")] == [b"login"]
        assert messages_in(app.broker, "entries") == []


def test_templates_that_name_one_folder_share_its_broker(tmp_path: Path) -> None:
    """One process owns a folder, through one broker."""
    folder = f"embedded:{tmp_path / 'store'}"
    settings = {
        **IN_MEMORY,
        "rocketmq.templates.audit.name-server": folder,
        "rocketmq.templates.log.name-server": folder,
    }
    with app_of(settings=settings) as app:
        audit, log = (app.get(RocketMQTemplate, name) for name in ("audit", "log"))

        assert audit is not log
        assert audit.broker is log.broker is app.get(Broker, "log")  # type: ignore[type-abstract]
        assert list(app.brokers) == ["broker", "audit"]


def test_a_template_without_a_name_server_uses_the_embedded_broker_of_the_application() -> None:
    settings = {**IN_MEMORY, "rocketmq.templates.audit.group": "audit"}
    with app_of(Shop, settings=settings) as app:
        assert app.get(Shop).audit.broker is app.broker
        assert app.get(Broker, "audit") is app.broker  # type: ignore[type-abstract]


def test_brokers_of_templates_are_closed_with_the_application() -> None:
    with app_of(settings=AUDIT) as app:
        audit = app.brokers["audit"]
        assert isinstance(audit, EmbeddedBroker)

    with pytest.raises(Exception, match="closed|not running"):
        audit.sends.send(Message("entries", b"late"))


# --- listeners, transactions and requests --------------------------------------------------------


def test_a_listener_names_the_broker_of_a_template() -> None:
    received: list[str] = []

    @message_listener("entries", "auditors", broker="audit")
    def note(entry: str) -> None:
        received.append(entry)

    with app_of(Shop, note, settings=AUDIT) as app:
        app.get(Shop).audit.sync_send("entries", "login")
        app.template.sync_send("entries", "of the other broker")
        Harness(app).run_until_idle()

    assert received == ["login"]


def test_a_listener_names_a_folder_by_its_address(tmp_path: Path) -> None:
    """The template of that folder and the listener have one broker."""
    received: list[str] = []
    address = f"embedded:{tmp_path / 'audit'}"

    @message_listener(
        "entries", "auditors", name_server="${audit.server}", consume_from_where="CONSUME_FROM_FIRST_OFFSET"
    )
    def note(entry: str) -> None:
        received.append(entry)

    settings = {**IN_MEMORY, "audit.server": address, "rocketmq.templates.audit.name-server": address}
    with app_of(Shop, note, settings=settings) as app:
        app.get(Shop).audit.sync_send("entries", "login")
        Harness(app).run_until_idle()

        assert list(app.brokers) == ["broker", "audit"]
    assert received == ["login"]


def test_a_listener_of_an_address_without_a_template_gets_a_broker_and_others_share_it(tmp_path: Path) -> None:
    address = f"embedded:{tmp_path / 'audit'}"

    @message_listener("entries", "auditors", name_server=address)
    def note(entry: str) -> None: ...

    @message_listener("entries", "billing", name_server=f"{address}/.")
    def bill(entry: str) -> None: ...

    with app_of(note, bill, settings=IN_MEMORY) as app:
        own, *others = app.brokers.values()
        assert [container.broker for container in app.containers] == [*others, *others]
        assert own not in others

    with EmbeddedBroker(tmp_path / "audit"):
        pass  # the folder was released


def test_one_group_may_have_different_subscriptions_on_two_clusters() -> None:
    @message_listener("orders", "billing")
    def bill(order: str) -> None: ...

    @message_listener("entries", "billing", broker="audit")
    def note(entry: str) -> None: ...

    with app_of(bill, note, settings=AUDIT) as app:
        assert app.listeners.is_ready


def test_transactions_belong_to_a_template() -> None:
    """The broker of the template checks them, with the group of its section."""
    executed: list[object] = []

    @transaction_listener(rocketmq_template_bean_name="audit")
    class AuditTransactions:
        def execute_local_transaction(self, message: Message, arg: object) -> TransactionState:
            executed.append(arg)
            return TransactionState.UNKNOWN

        def check_local_transaction(self, message: MessageExt) -> TransactionState:
            return TransactionState.COMMIT

    settings = {**AUDIT, "rocketmq.templates.audit.group": "audit"}
    with app_of(Shop, AuditTransactions, settings=settings) as app:
        app.get(Shop).audit.send_in_transaction("entries", b"login", arg=7)
        Harness(app).advance("6s")

        assert executed == [7]
        assert [each.properties["PGROUP"] for each in messages_in(app.brokers["audit"], "entries")] == ["audit"]


def test_a_request_of_a_template_is_answered_on_its_broker() -> None:
    @message_listener("prices", "pricing", broker="audit")
    def price(item: str) -> str:
        return f"{item}: 3 EUR"

    with app_of(Shop, price, settings=AUDIT) as app:
        harness = Harness(app)
        answer = app.get(Shop).audit.async_send_and_receive("prices", "tea", str)
        harness.run_until_idle()

        assert answer.result(0) == "tea: 3 EUR"


# --- errors at the start -------------------------------------------------------------------------


class WantsAudti:
    def __init__(self, template: Annotated[RocketMQTemplate, Named("audti")]) -> None: ...


@ext_template("reports")
class Reports(RocketMQTemplate): ...


@ext_template("reports", group="reports")
class OtherReports(RocketMQTemplate): ...


@ext_template(send_message_timeout="soon")
class Unclear(RocketMQTemplate): ...


@message_listener("entries", "auditors", broker="audti")
def of_unknown_broker(entry: str) -> None: ...


@message_listener("entries", "auditors", broker="audit", name_server="embedded:memory")
def of_two_brokers(entry: str) -> None: ...


@message_listener("entries", "auditors", broker="audit", access_key="me", secret_key="it")
def with_an_account(entry: str) -> None: ...


@message_listener("entries", "auditors", name_server="nowhere")
def of_no_address(entry: str) -> None: ...


@pytest.mark.parametrize(
    ("component", "more", "error", "text"),
    [
        (
            WantsAudti,
            {},
            DependencyError,
            (
                "WantsAudti: parameter 'template': no RocketMQTemplate is called 'audti' (there is: audit, template); "
                "choose one of these names, or declare it: a section rocketmq.templates.<name>, or @service(name=...)"
            ),
        ),
        (
            Reports,
            {},
            ConfigurationError,
            (
                "Reports is the template 'reports', and there is no section rocketmq.templates.reports (there is: "
                "audit); write that section, or give the decorator name_server="
            ),
        ),
        (
            (OtherReports, Reports),
            {},
            ConfigurationError,
            (
                "OtherReports and Reports are both the template 'reports'; give one of them another name: "
                '@ext_template("name")'
            ),
        ),
        (
            Unclear,
            {},
            ConfigurationError,
            "Unclear: the attributes of its decorator are invalid: send_message_timeout: must be a duration: ",
        ),
        (
            (),
            {"rocketmq.templates.template.group": "x"},
            ConfigurationError,
            "argument settings: rocketmq.templates.template: 'template' is the application's own; choose another name",
        ),
        (
            (),
            {"rocketmq.templates.9to5.group": "x"},
            ConfigurationError,
            (
                "rocketmq.templates.9to5: '9to5' is not a name of a template; use letters, digits, '_' and '-', and "
                "start with a letter"
            ),
        ),
        (
            (),
            {"rocketmq.templates.log.namespace": "x"},
            UnsupportedError,
            (
                "argument settings: rocketmq.templates.log.namespace cannot be honoured: the embedded broker serves "
                "one application and has no namespaces"
            ),
        ),
        (
            of_unknown_broker,
            {},
            ListenerError,
            (
                "broker='audti', and there is no template of that name (there is: audit); write a section "
                "rocketmq.templates.audti, or give name_server="
            ),
        ),
        (of_two_brokers, {}, ListenerError, "both choose a cluster; keep one of the two"),
        (
            with_an_account,
            {},
            ListenerError,
            (
                "an account, a namespace or TLS is given beside broker='audit'; the client of that template has its "
                "own; set them in rocketmq.templates.audit"
            ),
        ),
        (
            of_no_address,
            {},
            ListenerError,
            "name_server: allowed are 'embedded', 'embedded:memory', 'embedded:<folder>'",
        ),
    ],
)
def test_a_mistake_is_found_at_the_start(
    component: object, more: dict[str, object], error: type[Exception], text: str
) -> None:
    components = component if isinstance(component, tuple) else (component,)
    with pytest.raises(error) as raised:
        app_of(*components, settings={**AUDIT, **more}).start()

    assert text in str(raised.value)


def test_an_unknown_key_of_a_template_names_the_nearest_one() -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"templates\.audit\.nam-server: no such key; did you mean "
        r"'rocketmq\.templates\.audit\.name-server'",
    ):
        app_of(settings={**IN_MEMORY, "rocketmq.templates.audit.nam-server": "embedded:memory"}).start()


def test_an_invalid_address_of_a_template_is_an_error_with_its_place() -> None:
    with pytest.raises(
        ConfigurationError, match=r"argument settings: rocketmq\.templates\.audit\.name-server: allowed"
    ):
        app_of(settings={**IN_MEMORY, "rocketmq.templates.audit.name-server": "mq1"}).start()


def test_a_decorator_refuses_other_classes_and_unknown_attributes() -> None:
    with pytest.raises(DependencyError, match="Plain is not derived from RocketMQTemplate; write 'class Plain"):

        @ext_template("audit")  # type: ignore[type-var]
        class Plain: ...

    with pytest.raises(TypeError, match="@ext_template has no attribute 'topic'; known attributes are name_server"):
        ext_template("audit", topic="entries")  # type: ignore[call-arg]


def test_a_cluster_that_cannot_be_reached_is_named_in_the_report() -> None:
    settings = {**IN_MEMORY, "rocketmq.templates.audit.name-server": "127.0.0.1:1"}
    with pytest.raises(Exception, match="127.0.0.1:1") as raised:
        MQApplication(settings=settings, environment={}).start()

    assert "while starting the broker of rocketmq.templates.audit" in raised.value.__notes__


# --- middlewares ---------------------------------------------------------------------------------


class Stamping:
    """Writes its name into each message that passes."""

    def __init__(self, name: str) -> None:
        self.name = name

    def send(self, outgoing: Outgoing) -> Generator[Outgoing, object]:
        for message in outgoing.messages:
            message.properties["stamps"] = message.properties.get("stamps", "") + self.name
        yield outgoing


@middleware
class Everywhere(Stamping):
    def __init__(self) -> None:
        super().__init__("everywhere")


class OfShop(Stamping):
    def __init__(self, shop: Shop) -> None:
        assert isinstance(shop, Shop)
        super().__init__("shop")


@pytest.mark.parametrize(
    ("own", "stamps"),
    [
        ({}, "everywhere"),
        ({"middlewares": [Stamping("one, "), Stamping("two")]}, "one, two"),
        ({"middlewares": OfShop}, "shop"),
        ({"middlewares": f"{__name__}.Everywhere"}, "everywhere"),
        ({"middlewares": []}, None),
    ],
    ids=["the application's", "objects", "a class with a service", "a dotted name", "none"],
)
def test_middlewares_of_the_application_are_around_a_template_unless_it_names_its_own(
    own: dict[str, Any], stamps: str | None
) -> None:
    @ext_template("archive", name_server="embedded:memory", **own)
    class Archive(RocketMQTemplate): ...

    with app_of(Everywhere, Shop, Archive, settings=AUDIT) as app:
        app.get(Archive).sync_send("entries", "own")
        app.get(RocketMQTemplate, "audit").sync_send("entries", "of a section")

        assert [each.properties.get("stamps") for each in messages_in(app.brokers["archive"], "entries")] == [stamps]
        assert [each.properties.get("stamps") for each in messages_in(app.brokers["audit"], "entries")] == [
            "everywhere"
        ]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            "nowhere.Audit",
            "@ext_template: middlewares must be objects, classes, or dotted names of these, got 'nowhere.",
        ),
        (Shop, "middleware Shop has neither consume nor send"),
        ([RateLimit(5)], "@ext_template: middlewares: RateLimit has no send, so it does nothing for a template"),
    ],
)
def test_a_wrong_middleware_of_a_template_is_refused_at_once(given: Any, text: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        ext_template("audit", middlewares=given)

    assert text in str(raised.value)
