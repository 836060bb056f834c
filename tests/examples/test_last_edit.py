"""The example last_edit: one pending message by key, with a limit, and a cancel that sends."""

from __future__ import annotations

import pytest

from examples.last_edit import main


def test_each_cart_has_one_mail(capsys: pytest.CaptureFixture[str]) -> None:
    """Ada's after the last edit, Bob's after two hours at most, Cleo's thanks instead of a reminder."""
    main()

    assert capsys.readouterr().out.splitlines() == [
        "30 minutes, no mail yet",
        "mail: cart-ada: 3 books wait",
        "mail: cart-bob: 1 books wait",
        "paid in time: True",
        "mail: cart-cleo: thank you",
    ]
