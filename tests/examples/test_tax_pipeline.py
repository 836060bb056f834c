"""The example tax_pipeline: its input, its delays with a virtual clock, and the program."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.tax_pipeline.one_payment_listener import WATCHED_ID, OnePaymentListener
from examples.tax_pipeline.payment_sender import PaymentSender
from examples.tax_pipeline.tax_data import TaxPayment, read_payments, write_payments
from mqtemplate import MQApplication, SendStatus, VirtualClock
from mqtemplate.testing import Harness, messages_in
from tests.programs import run_python

ROOT = Path(__file__).parents[2]


@pytest.fixture
def payments(tmp_path: Path) -> list[TaxPayment]:
    """The input of the example, read from its file."""
    write_payments(tmp_path / "input.jsonl")
    return read_payments(tmp_path / "input.jsonl")


@pytest.fixture
def app() -> Iterator[MQApplication]:
    """Sender and plain listener, with a store in memory and a virtual clock."""
    application = MQApplication(
        PaymentSender,
        OnePaymentListener,
        config_folder=ROOT / "examples" / "tax_pipeline",
        settings={"rocketmq.name-server": "embedded:memory"},
        clock=VirtualClock(),
    )
    with application:
        yield application


def test_the_input_is_always_the_same_and_contains_the_watched_payment(
    tmp_path: Path, payments: list[TaxPayment]
) -> None:
    write_payments(tmp_path / "again.jsonl")

    assert read_payments(tmp_path / "again.jsonl") == payments
    assert [payment.id for payment in payments].count(WATCHED_ID) == 1
    assert len({payment.id for payment in payments}) == len(payments)


@pytest.mark.feature("E9")
def test_the_watched_payment_is_printed_after_its_delay(
    app: MQApplication, payments: list[TaxPayment], capsys: pytest.CaptureFixture[str]
) -> None:
    """Delay level 5 is five seconds here."""
    harness = Harness(app)
    watched = next(payment for payment in payments if payment.id == WATCHED_ID)

    result = app.get(PaymentSender).send_at_level_5(watched)
    harness.advance("4999ms")
    printed_before = capsys.readouterr().out
    harness.advance("1ms")

    assert result.send_status is SendStatus.SEND_OK
    assert printed_before == ""
    assert f"Payment {WATCHED_ID} arrived" in capsys.readouterr().out


def test_every_payment_is_delivered_once_with_every_kind_of_delay(
    app: MQApplication, payments: list[TaxPayment]
) -> None:
    harness = Harness(app)
    some = payments[:300]

    results = app.get(PaymentSender).send(some)
    harness.run_until_idle()
    at_once = messages_in(app.broker, "tax-data")
    harness.advance("10s")

    assert {result.result().send_status for result in results} == {SendStatus.SEND_OK}
    assert at_once == []
    assert sorted(message.keys or "" for message in messages_in(app.broker, "tax-data")) == sorted(
        payment.id for payment in some
    )


@pytest.mark.feature("C5", "C10")
@pytest.mark.spark
@pytest.mark.thorough
@pytest.mark.timeout(240)
def test_the_sums_of_spark_equal_those_of_the_input(tmp_path: Path) -> None:
    """The program compares them, and its exit code is the result."""
    run = run_python(tmp_path, "-m", "examples.tax_pipeline")

    assert run.returncode == 0, run.stdout + run.stderr
    assert "They equal the sums of the input file." in run.stdout
    assert f"Payment {WATCHED_ID} arrived" in run.stdout
    assert "Their topic, read as a table: " in run.stdout
