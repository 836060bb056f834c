"""Starters: their conditions, their order, and the report."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import pytest
import structlog

from mqtemplate.broker import Broker
from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import VirtualClock
from mqtemplate.context import ApplicationContext, AppSettings, AutoConfiguration, MQApplication, has_handlers
from mqtemplate.context.autoconfigure import GROUP, find_starters
from mqtemplate.errors import ConfigurationError

IN_MEMORY = {"rocketmq.name-server": "embedded:memory"}
Report = dict[str, tuple[bool, str]]


class Audit:
    pass


class BrokerAutoConfiguration(AutoConfiguration):
    def contribute(self, context: ApplicationContext) -> None:
        context.register(EmbeddedBroker(clock=VirtualClock()))


class AuditAutoConfiguration(AutoConfiguration):
    def contribute(self, context: ApplicationContext) -> None:
        context.register(Audit)


class AbsentAutoConfiguration(AutoConfiguration):
    requires = ("no_such_module", "no_such_package.part", "pathlib")

    def contribute(self, context: ApplicationContext) -> None:
        raise AssertionError("the starter must not act")


class UnwillingAutoConfiguration(AbsentAutoConfiguration):
    requires = ()

    def condition(self, settings: AppSettings) -> bool | str:
        return f"{settings.rocketmq.name_server} is not enough"


class SilentAutoConfiguration(UnwillingAutoConfiguration):
    def condition(self, settings: AppSettings) -> bool | str:
        return False


@pytest.fixture
def report_of() -> Iterator[Callable[..., Report]]:
    """Function that starts an application with these starters and returns the report."""
    apps: list[MQApplication] = []

    def start(*starters: object, components: tuple[object, ...] = (), **keys: object) -> Report:
        app = MQApplication(
            *components,
            settings={**IN_MEMORY, **keys},
            environment={},
            starters=[BrokerAutoConfiguration, *starters],  # type: ignore[list-item]
        )
        apps.append(app)
        app.start()
        return {outcome.starter: (outcome.applied, outcome.reason) for outcome in app.context.conditions}

    yield start
    for app in apps:
        app.stop()


def test_the_report_has_a_reason_for_each_starter(report_of: Callable[..., Report]) -> None:
    assert report_of(
        AuditAutoConfiguration, AbsentAutoConfiguration, UnwillingAutoConfiguration, SilentAutoConfiguration
    ) == {
        "absent": (False, "not installed: no_such_module, no_such_package.part"),
        "audit": (True, "added Audit"),
        "broker": (True, "added EmbeddedBroker"),
        "silent": (False, "its condition does not hold"),
        "unwilling": (False, "embedded:memory is not enough"),
    }


def test_a_starter_backs_off_for_an_object_of_the_application(report_of: Callable[..., Report]) -> None:
    class MyBroker(EmbeddedBroker):
        pass

    report = report_of(AuditAutoConfiguration, components=(MyBroker(clock=VirtualClock()), Audit))

    assert report["broker"] == (True, "backed off: there is MyBroker of application")
    assert report["audit"] == (True, "backed off: there is Audit of application")


def test_a_starter_backs_off_for_an_override() -> None:
    broker = EmbeddedBroker(clock=VirtualClock())
    starters = [BrokerAutoConfiguration]

    with MQApplication(overrides={Broker: broker}, environment={}, settings=IN_MEMORY, starters=starters) as app:
        assert app.broker is broker
        assert app.context.conditions[0].reason == "backed off: EmbeddedBroker is overridden"
    broker.close()


def test_a_starter_can_be_excluded_by_name(report_of: Callable[..., Report]) -> None:
    report = report_of(AuditAutoConfiguration, **{"mqtemplate.autoconfigure.exclude": "audit"})

    assert report["audit"] == (False, "excluded by mqtemplate.autoconfigure.exclude")


def test_excluding_an_unknown_starter_is_an_error(report_of: Callable[..., Report]) -> None:
    with pytest.raises(
        ConfigurationError, match=r"argument settings: .*there is no starter 'audti'; did you mean 'audit'"
    ):
        report_of(AuditAutoConfiguration, **{"mqtemplate.autoconfigure.exclude": ["audti"]})


def test_starters_act_after_those_they_name() -> None:
    order: list[str] = []

    def starter(title: str, *after: str) -> AutoConfiguration:
        class Any(BrokerAutoConfiguration):
            def contribute(self, context: ApplicationContext) -> None:
                order.append(title)
                super().contribute(context)

        Any.__name__ = f"{title}AutoConfiguration"
        Any.after = after
        return Any()

    starters = [starter("A", "c", "not_there"), starter("B"), starter("C", "b")]

    with MQApplication(settings=IN_MEMORY, environment={}, starters=starters):
        assert order == ["B", "C", "A"]


class OneAutoConfiguration(AuditAutoConfiguration):
    after = ("two",)


class TwoAutoConfiguration(AuditAutoConfiguration):
    after = ("one",)


def test_the_error_for_starters_that_wait_for_each_other_names_them(report_of: Callable[..., Report]) -> None:
    with pytest.raises(
        ConfigurationError, match=r"starters wait for each other: (one -> two -> one|two -> one -> two)"
    ):
        report_of(OneAutoConfiguration, TwoAutoConfiguration)


# --- entry points --------------------------------------------------------------------------------


def entry(name: str, target: str) -> EntryPoint:
    return EntryPoint(name, f"{__name__}:{target}" if ":" not in target else target, GROUP)


def test_a_starter_is_found_through_its_entry_point(report_of: Callable[..., Report]) -> None:
    assert report_of(entry("bookkeeping", "AuditAutoConfiguration"))["bookkeeping"] == (True, "added Audit")


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("no_such_module:X", r"starter 'bad' \(no_such_module:X\) cannot be loaded: ModuleNotFoundError"),
        ("pathlib:Nothing", r"starter 'bad' \(pathlib:Nothing\) cannot be loaded: AttributeError"),
        ("pathlib:Path", r"starter 'bad' \(pathlib:Path\) is not an AutoConfiguration; derive it from"),
    ],
)
def test_an_entry_point_without_a_starter_is_an_error(
    report_of: Callable[..., Report], target: str, problem: str
) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        report_of(entry("bad", target))


def test_two_starters_with_one_name_are_refused(report_of: Callable[..., Report]) -> None:
    with pytest.raises(ConfigurationError, match="two starters are called 'audit'"):
        report_of(AuditAutoConfiguration, AuditAutoConfiguration)


def install(folder: Path, name: str) -> None:
    """Write what pip writes for a distribution with one starter."""
    metadata = folder / f"{name}-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n", "utf-8")
    (metadata / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = {__name__}:AuditAutoConfiguration\n", "utf-8")


def test_a_starter_that_is_installed_while_the_process_runs_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The starters are read again only if a folder of the import path has changed, or the path."""
    monkeypatch.setitem(sys.modules, __name__, types.SimpleNamespace(AuditAutoConfiguration=AuditAutoConfiguration))
    before = set(find_starters())

    monkeypatch.syspath_prepend(tmp_path)
    install(tmp_path, "first")
    os.utime(tmp_path, (0, 0))
    assert set(find_starters()) == {*before, "first"}

    install(tmp_path, "second")
    assert set(find_starters()) == {*before, "first", "second"}

    monkeypatch.undo()
    assert set(find_starters()) == before


@pytest.mark.feature("C7")
def test_the_starters_of_this_distribution_are_found_once_it_is_installed() -> None:
    """A configuration file is enough: the installed starters are found."""
    ours = {point.name for point in entry_points(group=GROUP) if point.dist and point.dist.name == "mqtemplate"}
    if not ours:
        pytest.skip("mqtemplate is not installed here, it runs from its folder")
    assert {"embedded", "logging", "spark"} <= ours
    was_configured = structlog.is_configured()

    with MQApplication(settings=IN_MEMORY, environment={}, clock=VirtualClock()) as app:
        report = {outcome.starter: outcome.applied for outcome in app.context.conditions}
        assert report["embedded"]
        assert report["logging"] is not has_handlers(), "pytest has handlers of its own"
        assert isinstance(app.broker, EmbeddedBroker)
    assert structlog.is_configured() is was_configured
