"""Start and stop of an application: their order, and failures."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from mqtemplate.broker import Broker
from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import Clock, VirtualClock
from mqtemplate.context import AppSettings, MQApplication, service
from mqtemplate.errors import BrokerClosedError, ConfigurationError, DependencyError, ListenerError
from mqtemplate.listener import message_listener
from mqtemplate.message import MessageExt
from mqtemplate.results import SendStatus
from mqtemplate.template import RocketMQTemplate
from mqtemplate.testing.harness import Harness
from tests.context.loading import IN_MEMORY, AppOf
from tests.listener.hostile import KINDS
from tests.waiting import eventually

LONG_S = 30.0


@pytest.fixture
def events() -> list[str]:
    """Events in the order in which they happened."""
    return []


# --- messages ------------------------------------------------------------------------------------


class Inbox:
    """Stores the received texts."""

    def __init__(self) -> None:
        self.texts: list[str] = []


class ScheduleMessageService:
    def __init__(self, template: RocketMQTemplate) -> None:
        self.template = template

    def send_sync_schedule_message(self, key: str, message: str, timeout: int, delay_level: int) -> SendStatus:
        destination = "schedule-message-topic:sync-tags"
        result = self.template.sync_send(destination, message, timeout, delay_level, headers={"KEYS": key})
        return result.send_status


@message_listener(
    topic="schedule-message-topic", consumer_group="schedule-consumer-group", selector_expression="sync-tags"
)
class ScheduleListener:
    def __init__(self, inbox: Inbox) -> None:
        self.inbox = inbox

    def on_message(self, message: str) -> None:
        self.inbox.texts.append(message)


@pytest.mark.feature("B10", "C2", "C6")
def test_a_decorated_class_receives_the_delayed_message_of_a_service(app_of: AppOf) -> None:
    """The service gets the template by injection; the listener needs nothing but its decorator."""
    app = app_of(ScheduleMessageService, ScheduleListener, Inbox)
    app.start()
    harness = Harness(app)

    status = app.get(ScheduleMessageService).send_sync_schedule_message("4466", "hello", 100, 3)

    assert status is SendStatus.SEND_OK
    harness.advance("9s")
    assert app.get(Inbox).texts == []
    harness.advance("1s")
    assert app.get(Inbox).texts == ["hello"]


def test_an_application_does_not_start_if_a_listener_cannot_be_built(app_of: AppOf) -> None:
    with pytest.raises(
        DependencyError, match=r"ScheduleListener: parameter 'inbox' needs Inbox, and no object here is one"
    ):
        app_of(ScheduleListener).start()


def test_functions_objects_and_methods_can_be_listeners(app_of: AppOf) -> None:
    received: list[str] = []

    @message_listener("orders", "functions")
    def on_order(text: str) -> None:
        received.append(f"function {text}")

    @message_listener("orders", "objects")
    class Listener:
        def on_message(self, text: str) -> None:
            received.append(f"object {text}")

    class Methods:
        @message_listener("orders", "methods")
        def receive(self, text: str, message: MessageExt) -> None:
            received.append(f"method {text} of {message.topic}")

    app = app_of(on_order, Listener(), Methods)
    app.start()

    app.template.sync_send("orders", "x")
    Harness(app).run_until_idle()

    assert sorted(received) == ["function x", "method x of orders", "object x"]


def test_the_configuration_can_switch_a_listener_off(app_of: AppOf) -> None:
    key = "rocketmq.consumer.listeners.schedule-consumer-group.schedule-message-topic"
    app = app_of(ScheduleListener, Inbox, settings={**IN_MEMORY, key: False})
    app.start()

    assert app.containers == ()


def test_placeholders_in_a_decorator_are_resolved(app_of: AppOf) -> None:
    @message_listener("${shop.topic}", "${shop.group:g}", selector_expression="${shop.tags:*}")
    def on_order(text: str) -> None: ...

    app = app_of(on_order, settings={**IN_MEMORY, "shop.topic": "orders", "shop.tags": "paid"})
    app.start()

    settings = app.containers[0].endpoint.settings
    assert (settings.topics, settings.group, settings.selector.expression) == (("orders",), "g", "paid")


def test_the_error_for_a_placeholder_without_a_value_names_the_listener(app_of: AppOf) -> None:
    @message_listener("${shop.topic}", "g")
    def on_order(text: str) -> None: ...

    with pytest.raises(ConfigurationError, match=r"@message_listener on on_order: .*'\$\{shop.topic\}' has no value"):
        app_of(on_order).start()


def test_the_pull_consumer_keys_configure_receive(app_of: AppOf) -> None:
    app = app_of(
        settings={**IN_MEMORY, "rocketmq.pull-consumer": {"group": "g", "topic": "t", "selectorExpression": "a"}}
    )
    app.start()

    app.template.sync_send("t:a", "wanted")
    app.template.sync_send("t:b", "not wanted")

    assert app.template.receive(str, timeout=0) == ["wanted"]


def test_the_template_has_the_timeout_of_the_configuration(app_of: AppOf) -> None:
    app = app_of(settings={**IN_MEMORY, "rocketmq.producer.send-message-timeout": 77})
    app.start()

    assert app.template.send_message_timeout == 77


def test_the_broker_has_the_settings_of_the_configuration(app_of: AppOf, tmp_path: Path) -> None:
    keys = {
        "store-path": str(tmp_path / "s"),
        "message-delay-level": "90s",
        "broker-name": "b",
        "default-topic-queue-nums": 7,
    }
    app = app_of(settings={f"mqtemplate.broker.{key}": value for key, value in keys.items()})
    app.start()

    broker = app.get(EmbeddedBroker)
    assert (broker.path, broker.name, broker.engine.levels.text) == (tmp_path / "s", "b", "90s")
    assert broker.settings.default_topic_queue_nums == 7


# --- components ----------------------------------------------------------------------------------


def module_with(name: str, **members: object) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(members)
    return module


def test_the_components_of_a_module_are_marked_in_it_and_not_imported(app_of: AppOf) -> None:
    class Mine:
        pass

    class Foreign:
        pass

    class Unmarked:
        pass

    Mine.__module__ = Unmarked.__module__ = "shop"
    Foreign.__module__ = "elsewhere"
    shop = module_with("shop", Mine=service(Mine), Foreign=service(Foreign), Unmarked=Unmarked, Again=Mine)

    app = app_of(shop)

    assert app.context.components == (Mine,)


def test_the_components_of_a_package_include_what_its_init_imports_from_inside_it(app_of: AppOf) -> None:
    class Inner:
        pass

    Inner.__module__ = "shop.inner"

    assert app_of(module_with("shop", Inner=service(Inner))).context.components == (Inner,)


def test_a_module_may_be_given_by_name(app_of: AppOf) -> None:
    assert app_of(__name__).context.components == (ScheduleListener,)
    with pytest.raises(DependencyError, match="was given 'no_such_module', and there is no module of that name"):
        app_of("no_such_module").start()


@pytest.mark.parametrize("mistake", [None, 3, {"rocketmq.name-server": "embedded"}, [ScheduleListener]])
def test_a_value_that_is_not_a_component_is_refused(app_of: AppOf, mistake: object) -> None:
    with pytest.raises(DependencyError, match="components are classes, functions, objects and modules"):
        app_of(mistake).start()


def test_a_plain_function_is_refused(app_of: AppOf) -> None:
    def plain() -> None: ...

    with pytest.raises(DependencyError, match="plain is a plain function; mark it with @message_listener"):
        app_of(plain).start()


# --- order ---------------------------------------------------------------------------------------


def recorder(title: str, events: list[str], *, fails: tuple[str, ...] = ()) -> type:
    """Return a service class that records the steps of its life cycle, and fails in some of them."""

    def step(name: str) -> Callable[[object], None]:
        def run(_: object) -> None:
            events.append(f"{title}.{name}")
            if name in fails:
                raise ValueError(f"{title} cannot {name}")

        return run

    names = ("__init__", "on_start", "on_stop", "close")
    return type(title, (), {"__module__": __name__, **{name: step(name) for name in names}})


class RecordingBroker(EmbeddedBroker):
    """Records its start and its close."""

    events: list[str]

    def start(self) -> None:
        self.events.append("broker.start")
        super().start()

    def close(self) -> None:
        self.events.append("broker.close")
        super().close()


@pytest.fixture
def recording_broker(events: list[str]) -> RecordingBroker:
    broker = RecordingBroker(clock=VirtualClock())
    broker.events = events
    return broker


def test_objects_start_after_those_they_use_and_stop_before_them(
    app_of: AppOf, events: list[str], recording_broker: RecordingBroker
) -> None:
    """The broker starts first and stops last; the listeners start last and stop first."""
    lower = recorder("Lower", events)
    upper = recorder("Upper", events)
    base_init = upper.__init__  # type: ignore[misc]

    def init(self: object, lower: object) -> None:
        base_init(self)

    init.__annotations__ = {"lower": lower}
    upper.__init__ = init  # type: ignore[misc]

    @message_listener("orders", "g")
    class Listener:
        def __init__(self) -> None:
            events.append("Listener.__init__")

        def on_message(self, text: str) -> None: ...

    app = app_of(upper, Listener, lower, recording_broker)

    app.start()
    assert app.containers[0].is_running
    assert app.is_ready.is_set()
    app.stop()

    assert app.containers[0].state.value == "stopped"
    assert events == [
        "broker.start",
        "Lower.__init__",
        "Lower.on_start",
        "Upper.__init__",
        "Upper.on_start",
        "Listener.__init__",
        "Upper.on_stop",
        "Upper.close",
        "Lower.on_stop",
        "Lower.close",
        "broker.close",
    ]
    assert not app.is_ready.is_set()


def test_an_application_whose_listener_handles_nothing_any_more_is_not_ready() -> None:
    """A probe must see it: the process runs, and its messages wait."""

    @message_listener("orders", "billing")
    def bill(text: str) -> None: ...

    with MQApplication(bill, settings={"rocketmq.name-server": "embedded:memory"}, environment={}) as app:
        assert app.is_ready.is_set()
        app.broker.close()

        eventually(lambda: not app.is_ready.is_set(), "the application is not ready")
        assert app.health().listeners[app.containers[0].endpoint.id] == "broken"
        assert not app.health().is_ready


@pytest.mark.parametrize("kind", ["panic", "exit", "generator exit"])
def test_whatever_a_hook_raises_at_the_stop_everything_else_is_stopped(
    app_of: AppOf, events: list[str], recording_broker: RecordingBroker, kind: str
) -> None:
    class Hostile:
        def on_start(self) -> None: ...

        def on_stop(self) -> None:
            KINDS[kind]()

    app = app_of(recorder("First", events), service(Hostile), recording_broker)
    app.start()

    with pytest.raises(ExceptionGroup, match="did not stop cleanly") as raised:
        app.stop()

    assert len(raised.value.exceptions) == 1
    assert events[-3:] == ["First.on_stop", "First.close", "broker.close"]


def test_a_failed_start_closes_all_objects(app_of: AppOf, events: list[str], recording_broker: RecordingBroker) -> None:
    """Each built object is closed; ``on_stop`` is called only after a successful ``on_start``."""
    app = app_of(recorder("First", events), recorder("Second", events, fails=("on_start",)), recording_broker)

    with pytest.raises(ValueError, match="Second cannot on_start"):
        app.start()

    assert events[-5:] == ["Second.on_start", "Second.close", "First.on_stop", "First.close", "broker.close"]


def test_every_stop_runs_and_the_errors_are_raised_together(
    app_of: AppOf, events: list[str], recording_broker: RecordingBroker
) -> None:
    app = app_of(
        recorder("First", events, fails=("close",)),
        recorder("Second", events, fails=("on_stop", "close")),
        recording_broker,
    )
    app.start()

    with pytest.raises(ExceptionGroup) as stopped:
        app.stop()

    assert [str(error) for error in stopped.value.exceptions] == [
        "Second cannot on_stop",
        "Second cannot close",
        "First cannot close",
    ]
    assert stopped.value.exceptions[0].__notes__ == ["while stopping Second.on_stop"]
    assert events[-1] == "broker.close"


def test_an_error_in_the_with_block_is_raised_after_the_stop(app_of: AppOf, events: list[str]) -> None:
    """An error of the stop is added as a note."""
    app = app_of(recorder("Service", events, fails=("close",)))

    with pytest.raises(KeyError, match="work") as raised, app:
        raise KeyError("work")

    assert raised.value.__notes__ == ["stopping failed too: ValueError: Service cannot close"]


def test_an_override_is_not_closed(app_of: AppOf, events: list[str], recording_broker: RecordingBroker) -> None:
    fake = recorder("Fake", events)()

    with app_of(overrides={Broker: recording_broker, type(fake): fake}) as app:
        assert app.broker is recording_broker

    assert events == ["Fake.__init__", "broker.start"]
    recording_broker.close()


def test_stop_ends_a_service_without_close_and_a_close_with_arguments_is_not_called(
    app_of: AppOf, events: list[str]
) -> None:
    class Stopping:
        def stop(self) -> None:
            events.append("stopped")

    class Shop:
        def close(self, order: str) -> None:
            events.append("never")

    with app_of(Stopping, Shop):
        pass

    assert events == ["stopped"]


def test_a_hook_that_cannot_be_called_is_refused(app_of: AppOf) -> None:
    class Needing:
        def on_start(self, what: str) -> None: ...

    with pytest.raises(DependencyError, match=r"Needing\.on_start is called without arguments"):
        app_of(Needing).start()


def test_an_application_does_not_start_if_listeners_contradict_each_other(app_of: AppOf) -> None:
    @message_listener("orders", "g", selector_expression="a")
    def one(text: str) -> None: ...

    @message_listener("orders", "g", selector_expression="b")
    def other(text: str) -> None: ...

    app = app_of(one, other)

    with pytest.raises(ListenerError, match="have different subscriptions"):
        app.start()
    with pytest.raises(BrokerClosedError):
        app.template.sync_send("orders", "x")


def test_the_repr_of_an_application_names_components_and_state(app_of: AppOf) -> None:
    app = app_of(ScheduleListener, Inbox())

    assert repr(app) == "<MQApplication(ScheduleListener, Inbox): new, broker embedded:memory>"


def test_an_application_is_used_once(app_of: AppOf) -> None:
    app = app_of()
    with pytest.raises(DependencyError, match="the application is not started"):
        _ = app.template
    with app:
        pass
    app.stop()

    with pytest.raises(DependencyError, match="an application is started once"):
        app.start()


def test_the_names_broker_and_template_select_the_application_s_own_among_several(
    app_of: AppOf, events: list[str], recording_broker: RecordingBroker
) -> None:
    """The others are started and stopped too, and are injected by their names."""

    @service(name="broker")
    def own_broker(clock: Clock) -> EmbeddedBroker:
        return EmbeddedBroker(clock=clock)

    @service(name="audit_template")
    def audit_template(recording_broker: Broker) -> RocketMQTemplate:
        return RocketMQTemplate(recording_broker)

    @service(name="template")
    def template(broker: Broker) -> RocketMQTemplate:
        return RocketMQTemplate(broker)

    class Auditor:
        def __init__(self, template: RocketMQTemplate, audit_template: RocketMQTemplate) -> None:
            self.brokers = (template.broker, audit_template.broker)

    with app_of(own_broker, recording_broker, audit_template, template, Auditor) as app:
        assert app.get(Auditor).brokers == (app.broker, recording_broker)
        assert app.template.broker is app.broker is not recording_broker
        app.get(RocketMQTemplate, "audit_template").sync_send("audit", "x")
    assert events == ["broker.start", "broker.close"]


# --- clock and settings --------------------------------------------------------------------------


def test_all_components_have_the_given_clock(app_of: AppOf) -> None:
    clock = VirtualClock()
    app = app_of(ScheduleListener, Inbox, clock=clock)
    threads = threading.active_count()

    with app:
        assert app.broker.clock is app.get(Clock) is clock  # type: ignore[type-abstract]
        assert [each.name for each in app.services()][-1] == app.containers[0].name
        assert threading.active_count() == threads, "with a virtual clock nothing starts a thread"


def test_the_application_has_the_clock_of_a_given_broker(app_of: AppOf) -> None:
    broker = EmbeddedBroker(clock=VirtualClock())

    with app_of(broker, clock=None) as app:
        assert app.get(Clock) is broker.clock  # type: ignore[type-abstract]


def test_run_is_refused_with_a_virtual_clock(app_of: AppOf) -> None:
    with pytest.raises(ConfigurationError, match="nothing advances a virtual clock"):
        app_of().run()


def test_finished_settings_are_used_unchanged(app_of: AppOf) -> None:
    settings = AppSettings(rocketmq={"name_server": "embedded:memory"})  # type: ignore[arg-type]

    with app_of(settings=settings, environment=None) as app:
        assert app.get(AppSettings) is settings
    with pytest.raises(ConfigurationError, match="finished settings were given"):
        app_of(settings=settings, profiles=["dev"]).start()


# --- run -----------------------------------------------------------------------------------------


def test_run_injects_the_arguments_of_main_and_returns_its_result(app_of: AppOf, events: list[str]) -> None:
    def main(template: RocketMQTemplate, inbox: Inbox) -> str:
        return template.sync_send("orders", "x").send_status.value + str(inbox.texts)

    app = app_of(Inbox, recorder("Service", events), clock=None)

    assert app.run(main) == "SEND_OK[]"
    assert events[-1] == "Service.close"


def test_an_error_in_main_is_raised_after_the_stop(app_of: AppOf, events: list[str]) -> None:
    def main() -> None:
        raise KeyError("work")

    with pytest.raises(KeyError, match="work"):
        app_of(recorder("Service", events), clock=None).run(main)

    assert events[-1] == "Service.close"


def test_a_handler_that_stops_an_application_that_another_thread_stops_does_not_wait_for_it(
    app_of: AppOf, caplog: pytest.LogCaptureFixture
) -> None:
    """The other thread waits for this handler."""
    is_called = threading.Event()

    @message_listener("orders", "g")
    def on_order(text: str) -> None:
        is_called.set()
        eventually(lambda: not app.is_ready.is_set(), "the other thread stops the application")
        app.stop()

    app = app_of(on_order, clock=None)
    app.start()
    app.template.sync_send("orders", "end")
    assert is_called.wait(LONG_S)
    app.stop()

    assert "unfinished=0" in caplog.text


def test_a_handler_may_stop_the_application(app_of: AppOf) -> None:
    """``stop`` in a handler only requests it from the thread in ``run``: the handler does not wait for itself."""

    @message_listener("orders", "g")
    def on_order(text: str) -> None:
        app.stop()

    def main(template: RocketMQTemplate) -> None:
        template.sync_send("orders", "end")

    app = app_of(on_order, clock=None)
    done = threading.Event()

    def run() -> None:
        app.run(main, keep_running=True)
        done.set()

    threading.Thread(target=run, daemon=True).start()

    assert done.wait(LONG_S)
    assert not app.is_ready.is_set()
