"""Every file of a real checkpoint, damaged in every way: a listener refuses to start, or repeats the right batches."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.errors import SparkError
from mqtemplate.listener import ListenerSpec
from mqtemplate.message import Message, MessageQueue
from mqtemplate.spark import AVAILABLE_NOW, SparkBatch, SparkListenerContainer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [
    pytest.mark.spark,
    pytest.mark.thorough,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore:.*:ResourceWarning"),
]

BATCH, BATCHES = 5, 3
DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-3]),
    "emptied": lambda path: path.write_bytes(b""),
    "garbled": lambda path: path.write_bytes(path.read_bytes()[:9] + b"\xff" + path.read_bytes()[10:]),
    "deleted": Path.unlink,
}


class Numbers:
    """Listener that collects the numbers of each batch by query and batch id. It fails in the last batch on demand."""

    def __init__(self, *, fails: bool = False) -> None:
        self.batches: dict[tuple[str, int], list[int]] = {}
        self._fails = fails

    def on_batch(self, messages: DataFrame, batch: SparkBatch) -> None:
        numbers = sorted(int(row.body) for row in messages.select("body").collect())
        self.batches[batch.query_id, batch.batch_id] = numbers
        if self._fails and batch.batch_id == BATCHES - 1:
            raise ValueError("the sink is down")


def run(spark: SparkSession, broker: EmbeddedBroker, checkpoint: Path, endpoint: Numbers) -> None:
    """Run a listener until all messages are handled, or its query ends with an error."""
    attributes: dict[str, Any] = {
        "trigger": AVAILABLE_NOW,
        "max_attempts": 1,
        "max_offsets_per_trigger": BATCH,
        "checkpoint": str(checkpoint),
    }
    spec = ListenerSpec(topics=("orders",), consumer_group="billing", attributes=attributes)
    container = SparkListenerContainer(endpoint, spark, broker, checkpoint, spec=spec)
    try:
        container.start()
        container.await_idle()
    finally:
        container.stop()


def test_a_damaged_file_is_named_or_does_no_harm(spark: SparkSession, broker: EmbeddedBroker, tmp_path: Path) -> None:
    """A batch that is repeated has the id and the messages that it had, and no message is left out."""
    for number in range(BATCH * BATCHES):
        broker.sends.send(Message("orders", b"%d" % number), MessageQueue("orders", broker.name, 0))
    killed, whole = Numbers(fails=True), tmp_path / "whole"
    with pytest.raises(SparkError, match="the sink is down"):
        run(spark, broker, whole, killed)
    files = sorted(path.relative_to(whole) for path in whole.rglob("*") if path.is_file())
    outcomes: dict[str, str] = {}

    for name in files:
        for damage, apply in DAMAGES.items():
            damaged = tmp_path / f"{damage} {name}".replace("/", " ")
            shutil.copytree(whole, damaged)
            apply(damaged / name)
            repeated = Numbers()
            try:
                run(spark, broker, damaged, repeated)
            except SparkError as exc:
                outcomes[f"{name} {damage}"] = str(exc)
            else:
                assert repeated.batches.items() <= killed.batches.items(), (name, damage)
                assert max(killed.batches) in repeated.batches, (name, damage)

    assert {"metadata", "offsets/2", "commits/1", "mqtemplate-first-offsets.json"} <= set(map(str, files))
    assert outcomes
    for case, text in outcomes.items():
        assert str(tmp_path) in text, case
        assert "Restore the folder from a backup" in text or "Delete the file" in text or "permissions" in text, case
