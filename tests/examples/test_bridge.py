"""The example bridge, with a virtual clock."""

from __future__ import annotations

from pathlib import Path

from examples.bridge.app import Bridge
from mqtemplate import MQApplication, RocketMQTemplate, VirtualClock
from mqtemplate.testing import Harness, messages_in

ROOT = Path(__file__).parents[2]


def test_each_message_goes_from_one_store_to_the_other_with_all_that_belongs_to_it(tmp_path: Path) -> None:
    stores = {name.upper(): f"embedded:{tmp_path / name}" for name in ("headquarters", "shop")}
    app = MQApplication(Bridge, config_folder=ROOT / "examples" / "bridge", environment=stores, clock=VirtualClock())
    with app:
        headquarters = app.get(RocketMQTemplate, "headquarters")
        headquarters.sync_send("orders:paid", {"id": 7}, keys="7", headers={"from": "Berlin"})
        Harness(app).run_until_idle()

        [message] = messages_in(app.brokers["shop"], "orders")
        assert (message.body, message.tags, message.keys) == (b'{"id":7}', "paid", "7")
        assert message.user_properties == {"from": "Berlin", "contentType": "application/json"}
        assert messages_in(app.broker, "orders") == []


def test_a_message_waits_while_the_other_side_cannot_be_reached(tmp_path: Path) -> None:
    """It is retried like any message whose handler fails."""
    stores = {name.upper(): f"embedded:{tmp_path / name}" for name in ("headquarters", "shop")}
    app = MQApplication(Bridge, config_folder=ROOT / "examples" / "bridge", environment=stores, clock=VirtualClock())
    with app:
        harness = Harness(app, raise_handler_errors=False)
        bridge = app.get(Bridge)
        shop, bridge.shop = bridge.shop, None  # type: ignore[assignment]
        app.get(RocketMQTemplate, "headquarters").sync_send("orders", "tea")
        harness.run_until_idle()
        bridge.shop = shop
        harness.advance("10s")

        assert [each.body for each in messages_in(app.brokers["shop"], "orders")] == [b"tea"]
