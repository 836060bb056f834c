"""Mistakes that a start finds: what was meant, and what to do."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from mqtemplate import (
    Broker,
    MessageExt,
    RocketMQTemplate,
    load_settings,
    message_listener,
)
from mqtemplate.context import service
from mqtemplate.context.failure_report import failure_report
from mqtemplate.errors import ConfigurationError, DependencyError, ListenerError
from tests.context.loading import IN_MEMORY, app_with

# --- sections ------------------------------------------------------------------------------------


def test_sections_of_the_application_have_any_other_name(tmp_path: Path) -> None:
    (tmp_path / "application.yml").write_text(
        "rocket:\n  size: 1\nspring:\n  datasource: {}\nrocket-mq:\n  name-server: m:1\n"
    )

    assert load_settings(tmp_path, environment={}).rocketmq.name_server == "m:1"


# --- the local folder ----------------------------------------------------------------------------


def test_without_a_name_server_the_start_says_loudly_where_messages_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    with capture_logs() as events, app_with(settings={}):
        pass

    [notice] = [event for event in events if event["log_level"] == "warning"]
    assert notice["event"] == "broker.local_folder"
    assert notice["folder"] == str(tmp_path / "mqtemplate-store")
    assert notice["config"] == f"no application.yml in {tmp_path}"


@pytest.mark.parametrize("settings", [IN_MEMORY, {"rocketmq.name-server": "embedded"}])
def test_an_explicit_choice_needs_no_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, object]
) -> None:
    monkeypatch.chdir(tmp_path)

    with capture_logs() as events, app_with(settings=settings, profiles=["prod"]):
        pass

    assert "broker.local_folder" not in [event["event"] for event in events]


@pytest.mark.parametrize("profile", ["prod", "production", "Prod"])
def test_in_production_the_embedded_broker_must_be_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profile: str
) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ConfigurationError) as raised:
        app_with(settings={}, profiles=[profile]).start()

    assert str(raised.value) == (
        f"rocketmq.name-server is missing (configuration: no application.yml in {tmp_path}) and the profile "
        f"{profile.lower()!r} is active: messages would go to the local folder {tmp_path / 'mqtemplate-store'}; set "
        "rocketmq.name-server to 'host:port' of a server or cluster, or to 'embedded' if that folder is meant"
    )
    assert f"Where       {__file__}, line " in failure_report(raised.value), "the user's code, not the starter's"
    assert list(tmp_path.iterdir()) == []


# --- handlers and components ---------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [threading.Thread, list[threading.Thread], dict[str, threading.Thread]])
def test_a_type_that_no_body_can_become_is_refused_at_the_start(wanted: object) -> None:
    def bill(order: object) -> None: ...

    bill.__annotations__["order"] = wanted

    with pytest.raises(ListenerError, match="bill.*: a body cannot become a .*; annotate the parameter with"):
        app_with(message_listener("orders", "billing")(bill)).start()


@pytest.mark.parametrize("wanted", [bytes, str, dict, object, int, list[dict[str, int]], MessageExt])
def test_types_that_a_body_can_become_are_accepted(wanted: object) -> None:
    def bill(order: object) -> None: ...

    bill.__annotations__["order"] = wanted

    with app_with(message_listener("orders", "billing")(bill)) as app:
        assert len(app.containers) == 1


def test_a_converter_of_the_application_may_know_other_types() -> None:
    """A converter without ``check_type`` is not asked."""

    class Locks:
        def to_body(self, payload: object) -> tuple[bytes, str | None]:
            return b"lock", None

        def from_body(self, body: bytes, target_type: object, properties: object) -> object:
            return threading.Lock()

    def bill(order: threading.Thread) -> None: ...

    with app_with(message_listener("orders", "billing")(bill), Locks()) as app:
        assert len(app.containers) == 1


def test_a_module_in_which_nothing_is_marked_is_refused() -> None:
    with pytest.raises(DependencyError, match=r"the module 'json' \(.*json/__init__.py\), and nothing in it is marked"):
        app_with("json").start()


# --- a second template ---------------------------------------------------------------------------


@service(name="audit_template")
def audit_template(broker: Broker) -> RocketMQTemplate:
    return RocketMQTemplate(broker, send_message_timeout="7s")


@service(name="template")
def own_template(broker: Broker) -> RocketMQTemplate:
    return RocketMQTemplate(broker, send_message_timeout="8s")


class Shop:
    def __init__(self, template: RocketMQTemplate, other: RocketMQTemplate, audit_template: RocketMQTemplate) -> None:
        self.timeouts = [each.send_message_timeout for each in (template, other, audit_template)]


def test_a_second_template_stands_beside_the_template() -> None:
    with app_with(audit_template, Shop) as app:
        assert app.template.send_message_timeout == 3_000
        assert app.get(Shop).timeouts == [3_000, 3_000, 7_000]


def test_a_template_of_that_name_is_the_template() -> None:
    with app_with(own_template) as app:
        assert app.template.send_message_timeout == 8_000
