"""What stands around the fragments of the pages, so that they run as they are printed.

A fragment is found by a text in it. Its program is the code here with the fragment in place of the line ``# block``,
indented as that line. All programs start with the imports of `PRELUDE`, in an empty folder.
"""

from __future__ import annotations

from typing import NamedTuple


class Surroundings(NamedTuple):
    """Code around one fragment.

    Attributes:
        contains: A text that only this fragment of the page has.
        program: Code with a line ``# block``; ``run_test(function)`` in it passes the fixtures of pytest.
    """

    page: str
    contains: str
    program: str = "# block"


PRELUDE = """
import asyncio
from collections.abc import Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel

from mqtemplate import *
from mqtemplate.testing import Harness

MEMORY = {"rocketmq.name-server": "embedded:memory", "rocketmq.producer.group": "shop"}


class Order(BaseModel):
    number: str = "A-1"
"""

WITH_TEMPLATE = """
with EmbeddedBroker("./data") as broker:
    template = RocketMQTemplate(broker)
    template.sync_send("reminders", "first", delay="1h")
    order, when = Order(), datetime.now(UTC) + timedelta(days=1)
    # block
"""

SCHEDULE = """
@scheduled(cron="0 9 * * MON-FRI", zone="Europe/Berlin")
def nightly_report(run: ScheduledRun) -> None:
    print(run.scheduled_at)


"""

FRAGMENTS = (
    Surroundings("quickstart.md", "# timeout in ms, delay level", WITH_TEMPLATE),
    Surroundings("delayed-messages.md", "template.reschedule(reminder.handle"),
    Surroundings("delayed-messages.md", "cursor = page.cursor", WITH_TEMPLATE),
    Surroundings(
        "async.md",
        "async for order in orders",
        """
class Done(Exception):
    pass


async def bill(order: Order) -> None:
    assert order.number == "A-1"
    raise Done


async def main() -> None:
    async with MQApplication(settings=MEMORY) as app:
        await app.template.async_send("orders:paid", Order())
        # block


try:
    asyncio.run(main())
except Done:
    pass
""",
    ),
    Surroundings(
        "async.md",
        "async def lifespan(web: FastAPI)",
        """
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient

Path("application.yml").write_text("rocketmq: {name-server: 'embedded:memory'}")


@service
class Anything:
    pass


# block

with TestClient(web) as client:
    assert client.post("/orders", json={"number": "A-1"}).status_code == 200
""",
    ),
    Surroundings(
        "clusters.md",
        "class Shop:",
        """
# block

further = {"rocketmq.templates.audit.name-server": "embedded:memory", "rocketmq.templates.audit.group": "audit"}
with MQApplication(Shop, settings=MEMORY | further) as app:
    app.get(Shop)
""",
    ),
    Surroundings("asyncapi.md", "@documents_send(", "class Reminder(Order):\n    pass\n\n\n# block\n"),
    Surroundings("clusters.md", "class AuditTemplate(RocketMQTemplate)"),
    Surroundings("clusters.md", "def note(entry: str)"),
    Surroundings("clusters.md", "class Bridge:"),
    Surroundings(
        "configuration.md",
        "class ShopSettings(BaseModel)",
        """
# block

with MQApplication(Shop, settings=MEMORY | {"shop.name": "corner"}) as app:
    app.get(Shop)
""",
    ),
    Surroundings(
        "converters.md",
        "ConverterByContentType({",
        """
from mqtemplate.converters import AvroConverter, ConverterByContentType, ProtobufConverter

schema = {"type": "record", "name": "Order", "fields": [{"name": "number", "type": "string"}]}
# block
""",
    ),
    Surroundings(
        "converters.md",
        "class CsvConverter",
        """
# block

assert CsvConverter().from_body(*CsvConverter().to_body(["tea", 3])[:1], list, {}) == ["tea", "3"]
""",
    ),
    Surroundings(
        "effect-once.md",
        "once = SQLAlchemyInboxMiddleware(engine)",
        """
import sqlalchemy as sa
from sqlalchemy.orm import Session

from mqtemplate.outbox import SQLAlchemyInboxMiddleware, inbox_session, outbox_tables

engine, metadata = sa.create_engine("sqlite:///shop.db"), sa.MetaData()
outbox_tables(metadata)
orders = sa.Table("orders", metadata, sa.Column("id", sa.Integer, primary_key=True), sa.Column("state", sa.Text))
metadata.create_all(engine)
with engine.begin() as connection:
    connection.execute(orders.insert().values(id=7, state="new"))

# block

with EmbeddedBroker(None, clock=VirtualClock()) as broker:
    with MQApplication(bill, settings=MEMORY, environment={}, overrides={Broker: broker}) as app:
        for _ in range(2):
            broker.sends.send(Message("orders", b"7", {"UNIQ_KEY": "A1"}))
        Harness(app).advance("1s")
with engine.connect() as connection:
    assert connection.execute(sa.select(orders.c.state)).scalar_one() == "billed"
    assert connection.execute(sa.text("SELECT count(*) FROM mqtemplate_inbox")).scalar_one() == 1
""",
    ),
    Surroundings(
        "handlers.md",
        "unit.session.add(Payment(order.id))",
        """
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from mqtemplate.outbox import OutboxSession, SQLAlchemyInbox, SQLAlchemyOutbox


class Receipt(BaseModel):
    order: str


# block

assert pay.__name__ == "pay"
""",
    ),
    Surroundings("logging.md", 'event_formatter("json")'),
    Surroundings(
        "metrics.md",
        ".metrics.samples()",
        """
from mqtemplate.observability import Observability

with MQApplication(settings=MEMORY | {"mqtemplate.management.enabled": True}) as app:
    # block
""",
    ),
    Surroundings(
        "observability.md",
        "observability.watch(registry)",
        """
from mqtemplate.listener import ListenerRegistry
from mqtemplate.observability import Observability

converter = JsonMessageConverter()
with EmbeddedBroker() as broker:
    # block
    template.sync_send("orders", "tea")
""",
    ),
    Surroundings(
        "observability.md",
        'web.mount("/actuator"',
        """
from fastapi import FastAPI

from mqtemplate.console import Actuator, asgi_app

web = FastAPI()
with MQApplication(settings=MEMORY | {"mqtemplate.management.enabled": True}) as app:
    # block
""",
    ),
    Surroundings("remote.md", "def send_one()"),
    Surroundings(
        "schedules.md",
        'schedules.pause("nightly_report"',
        SCHEDULE
        + """
with MQApplication(nightly_report, settings=MEMORY, clock=VirtualClock()) as app:
    schedules = app.get(Schedules)
    # block
""",
    ),
    Surroundings(
        "schedules.md",
        "def test_the_report_runs_on_weekdays",
        SCHEDULE
        + """
# block

run_test(test_the_report_runs_on_weekdays)
""",
    ),
    Surroundings(
        "architecture/context.md",
        "class Audit:",
        """
@service
class Store:
    pass


# block

with MQApplication(Store, Audit, settings=MEMORY) as app:
    app.get(Audit)
""",
    ),
    Surroundings(
        "architecture/context.md",
        "class MetricsAutoConfiguration(AutoConfiguration)",
        """
from mqtemplate.context import ApplicationContext, AutoConfiguration

# block

assert MetricsAutoConfiguration().condition(load_settings(environment={}))
""",
    ),
)
