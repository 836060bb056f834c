"""The program: write the input, send it, add it up with Spark, and compare the sums with the input."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Annotated

from mqtemplate import MQApplication, Section

from .one_payment_listener import WATCHED_ID, OnePaymentListener
from .payment_sender import LEVEL_5, LONGEST_MS, PaymentSender
from .pipeline_settings import PipelineSettings
from .summary_listener import Progress, SummaryListener
from .sums_listener import ReceivedSums, SumsListener
from .sums_table import read_sums, table
from .tax_data import read_payments, sums_by_region_and_period, write_payments
from .topic_table import sums_in_topic

HERE = Path(__file__).parent
COMPONENTS = (PaymentSender, OnePaymentListener, SummaryListener, Progress, SumsListener, ReceivedSums)
MAX_WAIT_S = 120  # the first batches of Spark take a minute on a busy machine; nothing waits longer than it must


def main() -> int:
    """Run the example.

    Returns:
        The exit code: 0 if Spark's sums equal the sums of the input, 1 if not, 130 after Ctrl-C.
    """
    application = MQApplication(*COMPONENTS, config_folder=HERE)
    settings = application.settings.bind("tax-pipeline", PipelineSettings)
    shutil.rmtree(settings.folder, ignore_errors=True)
    write_payments(settings.input_file, settings.payments)
    print(f"{settings.payments} payments written to {settings.input_file}. Starting the application and Spark ...")
    is_complete = application.run(send_and_wait)
    print("The application is closed.")
    if is_complete is None:
        return 130
    if not is_complete:
        print(
            f"Not all payments were summed up within {MAX_WAIT_S} s: the machine is busy, or an error is logged above."
        )
        return 1
    return 0 if print_and_compare(settings) else 1


def send_and_wait(
    settings: Annotated[PipelineSettings, Section("tax-pipeline")],
    sender: PaymentSender,
    progress: Progress,
    received: ReceivedSums,
) -> bool:
    """Send all payments and wait for Spark. The application injects the arguments by their types.

    Returns:
        True if Spark received every payment, and its sums of all of them arrived as messages.
    """
    payments = read_payments(settings.input_file)
    watched = next(payment for payment in payments if payment.id == WATCHED_ID)
    result = sender.send_at_level_5(watched)
    print(f"Payment {watched.id} sent with level {LEVEL_5}: {result.send_status.name}, message id {result.msg_id}")
    results = sender.send([payment for payment in payments if payment is not watched])
    statuses = Counter(result.result().send_status.name for result in results)
    counts = ", ".join(f"{count} {status}" for status, count in statuses.items())
    print(f"The others sent, by delay level, by relative delay and by deliver time: {counts}.")
    print(f"All are due within {LONGEST_MS / 1_000:g} s; Spark reads a batch about once a second ...")
    is_complete = progress.wait_for(len(payments), MAX_WAIT_S)
    print(f"Spark has received {progress.messages} messages in {progress.batches} batches.")
    has_sums = is_complete and received.wait_for(len(payments), MAX_WAIT_S)
    total = sum(payment.amount_cents for payment in payments)
    print(f"Its sums came back as messages: {received.payments} payments, {received.amount_cents / 100:,.2f} in total.")
    if not has_sums or received.payments != len(payments) or received.amount_cents != total:
        return False
    return print_topic(settings.store_folder, total)


def print_topic(store: Path, total: int) -> bool:
    """Read the topic of the sums as a table; return True if it has the total of the input."""
    sums = sums_in_topic(store)
    cents = sum(sums.values())
    print(f"Their topic, read as a table: {len(sums)} regions and periods, {cents / 100:,.2f} in total.")
    return cents == total


def print_and_compare(settings: PipelineSettings) -> bool:
    """Print the table of Spark; return True if it has the sums of the input file."""
    sums = read_sums(settings.result_folder)
    print(f"Sums by region and period, from {settings.result_folder}:")
    for line in table(sums):
        print(line)
    is_right = sums == sums_by_region_and_period(read_payments(settings.input_file))
    print("They equal the sums of the input file." if is_right else "They differ from the sums of the input file.")
    return is_right
