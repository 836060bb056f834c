"""Keys, headers, and reserved names."""

from __future__ import annotations

import pytest

from mqtemplate.errors import MessageError
from mqtemplate.message import RESERVED_PROPERTIES
from mqtemplate.testing import RecordingTemplate

MEANINGFUL = {
    "KEYS", "TAGS", "WAIT", "DELAY",
    "TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS", "__STARTDELIVERTIME",
}  # fmt: skip


@pytest.mark.feature("G9")
@pytest.mark.parametrize("name", sorted(RESERVED_PROPERTIES - MEANINGFUL))
@pytest.mark.parametrize("prefix", ["", "rocketmq_"])
def test_reserved_names_are_refused(mqtemplate_template: RecordingTemplate, prefix: str, name: str) -> None:
    """Rocketmq-spring drops them silently."""
    with pytest.raises(MessageError, match=f"header '{prefix}{name}' is reserved: {name} belongs to the broker"):
        mqtemplate_template.sync_send("orders", b"body", headers={prefix + name: "1"})
