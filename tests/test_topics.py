"""The topic with the most similar name, as a hint after a typing error."""

from __future__ import annotations

import pytest

from mqtemplate.topics import nearest_topic

MANY = [f"{name}-{number}" for name in ("invoice", "parcel") for number in range(1_000)]


@pytest.mark.parametrize("typed", ["ordres", "oders", "order", "Orders", "orders-"])
@pytest.mark.parametrize("others", [[], MANY], ids=["few topics", "thousands of topics"])
def test_a_typing_error_is_recognised(typed: str, others: list[str]) -> None:
    assert nearest_topic(typed, ["payments", *others, "orders"]) == "orders"


def test_there_is_no_hint_if_hundreds_of_topics_are_equally_similar() -> None:
    """It would be chance, and comparing each new topic with all others would take longer with each of them."""
    assert nearest_topic("invoice-1000", MANY) is None


def test_topics_of_the_broker_are_no_hint() -> None:
    assert nearest_topic("RETRY_orders", ["%RETRY%orders", "TBW102"]) is None


def test_the_hint_is_never_the_topic_itself() -> None:
    """A topic that was missing a moment ago may have been created since."""
    assert nearest_topic("orders", ["orders", "order"]) == "order"
    assert nearest_topic("orders", ["orders"]) is None
