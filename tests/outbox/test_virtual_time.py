"""An outbox of an application belongs to the harness of the test."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.orm import Session

from mqtemplate.outbox import SQLAlchemyOutbox
from mqtemplate.testing import StartApp, messages_in
from tests.kit import Kit


def test_a_harness_steps_the_outbox_of_an_application_from_its_start_to_its_stop(
    engine: sa.Engine, mqtemplate_app: StartApp, kit: Kit
) -> None:
    """The test registers no relay; and one that does, as before, steps it once."""
    app = mqtemplate_app(engine, SQLAlchemyOutbox)
    outbox = app.get(SQLAlchemyOutbox)
    with Session(engine) as session, session.begin():
        outbox.send(session, "orders", "one")

    kit.harness.run_until_idle()
    kit.harness.add(outbox.relay)

    assert [message.body for message in messages_in(kit.broker, "orders")] == [b"one"]
    assert kit.harness.clock.services.count(outbox.relay) == 1
    app.stop()
    assert outbox.relay not in kit.harness.clock.services
