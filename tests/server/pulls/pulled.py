"""Pulls, and the records in their bodies."""

from __future__ import annotations

from dataclasses import replace

from mqtemplate.remoting.protocol.messages import decode_messages
from mqtemplate.server.pulls.raw_reader import RawPull


def numbers(pull: RawPull) -> list[int]:
    """Return the numbers that the records have as their bodies, as many as the pull counts."""
    found = [int(message.body) for message in decode_messages(pull.body, "broker-a")]
    assert len(found) == pull.count
    return found


def whole(pull: RawPull) -> RawPull:
    """Return the same pull with its records in one part, for comparisons."""
    return replace(pull, parts=(pull.body,))
