"""The example last_edit: one pending message by key, with a limit, and a cancel that sends."""

from __future__ import annotations

import pytest

from examples.last_edit import Carts, create_app
from mqtemplate import VirtualClock
from mqtemplate.testing import Harness


def test_each_cart_has_one_mail(capsys: pytest.CaptureFixture[str]) -> None:
    """Ada's after the last edit, Bob's after two hours at most, Cleo's thanks instead of a reminder."""
    with create_app(clock=VirtualClock()) as app:
        carts, harness = app.get(Carts), Harness(app)
        for books in (1, 2, 3):
            carts.edited("cart-ada", books)
            harness.advance("10m")
        assert capsys.readouterr().out == ""
        harness.advance("5m")

        carts.edited("cart-bob", 1)
        for _ in range(11):
            harness.advance("10m")
            carts.viewed("cart-bob")
        harness.advance("10m")

        carts.edited("cart-cleo", 5)
        assert carts.paid("cart-cleo")
        harness.advance("1h")

    assert capsys.readouterr().out.splitlines() == [
        "mail: cart-ada: 3 books wait",
        "mail: cart-bob: 1 books wait",
        "mail: cart-cleo: thank you",
    ]
