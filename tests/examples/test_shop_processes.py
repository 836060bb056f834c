"""The example shop as its profile ``cluster`` runs it: two web workers, PostgreSQL, and the broker as a server."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx
import pytest

from tests.outbox.postgres import binaries, postgres_server
from tests.processes.web_server import WebServer
from tests.server.process import BrokerProcess
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Environment of the shop: the profile, the database with its tables, and the broker."""
    if binaries() is None:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    with postgres_server() as url, BrokerProcess(tmp_path) as broker:
        yield {
            "MQTEMPLATE_PROFILES_ACTIVE": "cluster",
            "SHOP_DATABASE": url,
            "SHOP_NAME_SERVER": str(broker.name_server),
        }
        broker.stop()


@pytest.mark.thorough
def test_two_workers_share_the_orders_and_reserve_each_article_once(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    subprocess.run(
        [sys.executable, "-m", "examples.shop.database"],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'starters'}", **environment},
        check=True,
    )
    command = ("uvicorn", "--workers", "2", "--port", "0", "examples.shop.app:web")
    with WebServer(tmp_path, *command, environment=environment) as server:
        eventually(lambda: server.output.count("Application startup complete") == 2, "both workers run")
        with httpx.Client(base_url=server.url, timeout=60) as client, ThreadPoolExecutor(8) as customers:
            states = list(customers.map(lambda number: order_and_pay(client, number), range(60)))
            stocks = {each["id"]: each["stock"] for each in client.get("/articles").json()}
        code = server.stop()

    assert states.count("paid") == 40, states  # there are forty mugs
    assert states.count("rejected") == 20
    assert stocks["mug"] == 0
    assert "Traceback" not in server.output
    assert code == 0


def order_and_pay(client: httpx.Client, number: int) -> str:
    """Order a mug, pay it if it was reserved, and return the state of the order."""
    order = client.post("/orders", json={"customer": f"c{number}", "article": "mug"}).raise_for_status().json()["id"]

    def handled() -> str | None:
        state: str = client.get(f"/orders/{order}").raise_for_status().json()["state"]
        return None if state == "placed" else state

    state = eventually(handled, "the warehouse has handled the order")
    if state != "reserved":
        return state
    paid: str = client.post(f"/orders/{order}/payment").raise_for_status().json()["state"]
    return paid
