"""The demonstration: it starts the shop in a web server, plays its customers, and prints what happens."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import httpx2 as httpx

FOLDER = Path("out") / "shop-demo"
MAX_WAIT_S = 180.0  # Spark starts in ten seconds, or in minutes on a busy machine; nothing waits longer than it must


class Customers:
    """The customers: each call is one HTTP request."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def get(self, path: str) -> Any:
        """Return an answer, as JSON."""
        return self._client.get(path).raise_for_status().json()

    def post(self, path: str, **body: object) -> Any:
        """Send a request and return the answer, as JSON."""
        return self._client.post(path, json=body).raise_for_status().json()

    def order(self, customer: str, article: str, quantity: int = 1) -> int:
        """Place an order and wait until the warehouse has handled it; return its number."""
        placed: int = self.post("/orders", customer=customer, article=article, quantity=quantity)["id"]
        wait_until(lambda: self.state(placed) != "placed", f"the warehouse handles order {placed}")
        say(f"{customer} orders {quantity} x {article}: order {placed} is {self.state(placed)}")
        return placed

    def state(self, order: int) -> str:
        """Return the state of an order."""
        state: str = self.get(f"/orders/{order}")["state"]
        return state


def main(arguments: Sequence[str] = ()) -> int:
    """Run the demonstration.

    Returns:
        The exit code: 0 if everything happened.
    """
    parser = argparse.ArgumentParser(prog="python -m examples.shop", description=__doc__)
    parser.add_argument("--with-spark", action="store_true", help="add up the sales by Spark, too")
    with_spark = parser.parse_args(arguments).with_spark
    shutil.rmtree(FOLDER, ignore_errors=True)
    with running_shop("with_spark" if with_spark else "app") as client:
        tell(Customers(client), with_spark=with_spark)
    say("The shop is closed.")
    return 0


def tell(customers: Customers, *, with_spark: bool) -> None:
    """Play the customers of a day."""
    print("\nOrders. The order and its messages are stored in one transaction; the warehouse reserves the articles.")
    paid = customers.order("Ada", "tea", 2)
    unpaid = [customers.order("Bob", "mug"), customers.order("Cleo", "kettle"), customers.order("Dan", "kettle")]
    customers.order("Eve", "kettle")

    print(
        "\nAn article that does not exist: no retry helps, so the message is a dead letter at once. The log says why."
    )
    customers.order("Fay", "unicorn")

    print("\nA payment cancels the reminder, a delayed message, by its key; accounting replies with the receipt.")
    answer = customers.post(f"/orders/{paid}/payment")
    say(f"Ada pays order {paid}: {answer['state']}; her reminder is {answer['reminder']}")
    receipt = customers.get(f"/orders/{paid}/receipt")
    say(f"receipt of order {receipt['order']}: {', '.join(receipt['lines'])}, total {receipt['total']}")

    print("\nThe others do not pay: two reminders, two seconds apart (15 minutes and a day without the profile demo).")
    wait_until(lambda: {*map(customers.state, unpaid)} == {"cancelled"}, f"the orders {unpaid} are cancelled")
    wait_until(
        lambda: (stock(customers, "mug"), stock(customers, "kettle")) == (40, 2), "the articles are back in stock"
    )
    say(f"orders {', '.join(map(str, unpaid))} are cancelled, and their articles are back in stock")

    print("\nThe report of each day is written at night by a schedule, or now on request.")
    customers.post("/reports")
    wait_until(lambda: customers.get("/reports"), "the report is written")
    report = customers.get("/reports")[-1]
    say(f"report of {report['day']}: {report['orders']} paid order, {report['cents'] / 100:.2f} EUR")
    if with_spark:
        print("\nSpark reads the same topic in batches and adds up the sales.")
        wait_until(lambda: customers.get("/sales"), "Spark adds up the sales")
        for sales in customers.get("/sales"):
            say(f"sales of {sales['article']}: {sales['quantity']} for {sales['cents'] / 100:.2f} EUR")


def stock(customers: Customers, article: str) -> int:
    """Return how many of an article are in stock."""
    stocks: dict[str, int] = {each["id"]: each["stock"] for each in customers.get("/articles")}
    return stocks[article]


def say(text: str) -> None:
    """Print one line of the story."""
    print(f"  {text}", flush=True)


def wait_until(is_true: Callable[[], object], what: str) -> None:
    """Wait until something has happened.

    Raises:
        SystemExit: It did not happen in time.
    """
    deadline = time.monotonic() + MAX_WAIT_S
    while not is_true():
        if time.monotonic() > deadline:
            raise SystemExit(f"It did not happen within {MAX_WAIT_S:g} s: {what}.")
        time.sleep(0.05)


@contextlib.contextmanager
def running_shop(module: str) -> Generator[httpx.Client, None, None]:
    """Start the shop in uvicorn with the profile ``demo``, and stop it at the end."""
    port = free_port()
    print(f"Starting the shop: uvicorn examples.shop.{module}:web --port {port}, profile demo ...", flush=True)
    with (
        subprocess.Popen(
            [sys.executable, "-m", "uvicorn", f"examples.shop.{module}:web", f"--port={port}", "--log-level=warning"],
            env={
                **os.environ,
                "MQTEMPLATE_PROFILES_ACTIVE": "demo",
                "SHOP_STORE": str(FOLDER / "store"),
                "SHOP_DATABASE": f"sqlite:///{FOLDER}/shop.db",
                "MQTEMPLATE_SPARK_CHECKPOINT_PATH": str(FOLDER / "checkpoints"),
            },
        ) as server,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client,
    ):
        try:
            wait_until(lambda: server.poll() is not None or is_ready(client), "the shop is ready")
            if server.poll() is not None:
                raise SystemExit(f"The shop did not start: exit code {server.returncode}.")
            yield client
        finally:
            server.terminate()


def is_ready(client: httpx.Client) -> bool:
    """Return True if the shop answers that it is ready."""
    try:
        return client.get("/health/ready").status_code == httpx.codes.OK
    except httpx.TransportError:  # the server does not listen yet
        return False


def free_port() -> int:
    """Return a free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
