"""The Spark starter: its condition, and errors for Spark listeners that would never run."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import structlog

from mqtemplate import EmbeddedBroker, MQApplication, RocketMQTemplate, SparkBatch, VirtualClock, spark_listener
from mqtemplate.clock import SystemClock
from mqtemplate.errors import DependencyError
from mqtemplate.extras import install_command
from mqtemplate.server import BrokerServerSettings, LocalCluster
from mqtemplate_starter_embedded import EmbeddedAutoConfiguration
from mqtemplate_starter_rocketmq import RocketMQAutoConfiguration
from mqtemplate_starter_spark import SparkAutoConfiguration
from tests.server.tool import ANY_PORT, make_engine
from tests.waiting import PATIENCE_S, eventually

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

IN_MEMORY = {"rocketmq.name-server": "embedded:memory"}


def spark_in(folder: Path) -> dict[str, object]:
    """Return the settings of a session that starts quickly; see `mqtemplate.spark.session` for a short-lived one."""
    conf = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC", "spark.ui.enabled": "false"}
    return {"master": "local[1]", "checkpoint-path": str(folder / "checkpoints"), "conf": conf}


@spark_listener("orders", "totals")
def on_orders(orders: DataFrame, batch: SparkBatch) -> None: ...


class AbsentSparkAutoConfiguration(SparkAutoConfiguration):
    """The starter where the extra is not installed."""

    requires = ("no_such_pyspark",)


AbsentSparkAutoConfiguration.__name__ = "SparkAutoConfiguration"


def app_with(
    *components: object, spark: type[SparkAutoConfiguration] = SparkAutoConfiguration, **keys: object
) -> MQApplication:
    starters = [EmbeddedAutoConfiguration, spark]
    return MQApplication(
        *components, settings={**IN_MEMORY, **keys}, environment={}, clock=VirtualClock(), starters=starters
    )


def test_without_spark_listeners_no_session_is_created() -> None:
    pytest.importorskip("pyspark")

    with app_with() as app:
        reasons = {outcome.starter: outcome.reason for outcome in app.context.conditions}
        assert reasons["spark"] == "nothing to do: no component is a @spark_listener"
        assert app.context.parts == []


def test_without_pyspark_an_application_without_spark_listeners_runs() -> None:
    with app_with(spark=AbsentSparkAutoConfiguration) as app:
        reasons = {outcome.starter: outcome.reason for outcome in app.context.conditions}
        assert reasons["spark"] == "not installed: no_such_pyspark"


def test_the_error_for_a_spark_listener_without_pyspark_says_what_to_install() -> None:
    with pytest.raises(DependencyError) as refused:
        app_with(on_orders, spark=AbsentSparkAutoConfiguration).start()

    assert str(refused.value) == (
        "on_orders is a Spark listener, and nothing would run it (not installed: no_such_pyspark); "
        f"{install_command('spark')}, or set mqtemplate.spark.enabled: false"
    )


def test_spark_can_be_switched_off_and_the_log_names_the_listeners() -> None:
    with structlog.testing.capture_logs() as logs, app_with(on_orders, **{"mqtemplate.spark.enabled": False}):
        pass

    logged = [line for line in logs if line["event"] == "spark.not_run"]
    assert [(line["listeners"], line["reason"]) for line in logged] == [
        (["on_orders"], "mqtemplate.spark.enabled is false")
    ]


@pytest.mark.feature("C5", "C10")
@pytest.mark.spark
@pytest.mark.timeout(240)
def test_a_spark_listener_receives_batches(tmp_path: Path) -> None:
    """The context builds the listener by the types of its constructor. It runs as long as the application."""

    class Totals:
        def __init__(self) -> None:
            self.count = 0
            self.is_complete = threading.Event()

    @spark_listener("orders", "totals")
    class OrderTotals:
        def __init__(self, totals: Totals) -> None:
            self.totals = totals

        def on_batch(self, orders: DataFrame, batch: SparkBatch) -> None:
            self.totals.count += orders.count()
            if self.totals.count == 3:
                self.totals.is_complete.set()

    class Sender:
        def __init__(self, template: RocketMQTemplate) -> None:
            self.template = template

        def on_start(self) -> None:
            self.template.sync_send("orders:paid", ["a", "b", "c"])

    keys = {
        "rocketmq.name-server": f"embedded:{tmp_path / 'store'}",
        "mqtemplate.spark": spark_in(tmp_path),
    }
    starters = [EmbeddedAutoConfiguration, SparkAutoConfiguration]

    with MQApplication(Sender, OrderTotals, Totals, settings=keys, environment={}, starters=starters) as app:
        assert app.get(Totals).is_complete.wait(PATIENCE_S)
        part = app.context.parts[0]

    assert (tmp_path / "checkpoints").is_dir()
    assert not any(container.is_running for container in part.containers)  # type: ignore[attr-defined]


@pytest.mark.spark
@pytest.mark.thorough
@pytest.mark.timeout(240)
def test_an_application_with_a_query_that_ended_with_an_error_is_not_ready(tmp_path: Path) -> None:
    """The other parts go on; a monitor sees it by ``is_ready`` and by the metrics."""

    @spark_listener("orders", "broken", max_attempts=1)
    def fail(orders: DataFrame, batch: SparkBatch) -> None:
        raise ValueError("the sink is down")

    keys = {
        "rocketmq.name-server": f"embedded:{tmp_path / 'store'}",
        "mqtemplate.spark": spark_in(tmp_path),
    }
    starters = [EmbeddedAutoConfiguration, SparkAutoConfiguration]

    with MQApplication(fail, settings=keys, environment={}, starters=starters) as app:
        app.get(RocketMQTemplate).sync_send("orders", "a")
        eventually(lambda: not app.is_ready.is_set(), "the application is not ready")
        broker = app.broker
        assert isinstance(broker, EmbeddedBroker)
        metrics = broker.metrics.snapshot()

    assert (metrics["spark.broken.failures"], metrics["spark.broken.running"]) == (1, 0)


@pytest.mark.spark
@pytest.mark.thorough
@pytest.mark.timeout(240)
@pytest.mark.filterwarnings("ignore:.*:ResourceWarning")
def test_a_spark_listener_of_an_application_over_a_cluster_receives_batches(tmp_path: Path) -> None:
    """The name server in the configuration decides; the listener is the same."""
    received: list[bytes] = []
    is_complete = threading.Event()

    @spark_listener("orders", "totals", trigger="0 seconds")
    def collect(orders: DataFrame, batch: SparkBatch) -> None:
        received.extend(bytes(row.body) for row in orders.select("body").collect())
        if len(received) == 3:
            is_complete.set()

    with LocalCluster(make_engine(SystemClock()), BrokerServerSettings(listen=ANY_PORT)) as cluster:
        cluster.engine.create_topic("orders")
        keys = {
            "rocketmq": {"name-server": str(cluster.address), "producer": {"group": "shop"}},
            "mqtemplate.spark": spark_in(tmp_path),
        }
        starters = [RocketMQAutoConfiguration, SparkAutoConfiguration]
        with MQApplication(collect, settings=keys, environment={}, starters=starters) as app:
            app.get(RocketMQTemplate).sync_send("orders", ["a", "b", "c"])
            assert is_complete.wait(PATIENCE_S)

    assert sorted(received) == [b"a", b"b", b"c"]
