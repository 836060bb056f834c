"""The document ``docs/wire-protocol.md`` has each request with its header fields and bodies."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mqtemplate.remoting.protocol import RequestCode
from mqtemplate.remoting.protocol.headers.fields import declared_fields
from tests.remoting.protocol.code_tables import (
    REQUEST_BODIES,
    REQUEST_HEADERS,
    RESPONSE_BODIES,
    RESPONSE_HEADERS,
    rocketmq_name,
)

DOCUMENT = (Path(__file__).parents[3] / "docs" / "wire-protocol.md").read_text(encoding="utf-8")
ROWS = [line for line in DOCUMENT.splitlines() if line.startswith("|")]
SENDS = {
    # their fields are described once, before the table
    RequestCode.SEND_MESSAGE,
    RequestCode.SEND_MESSAGE_V2,
    RequestCode.SEND_BATCH_MESSAGE,
    RequestCode.SEND_REPLY_MESSAGE,
    RequestCode.SEND_REPLY_MESSAGE_V2,
    RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT,
}
CODES = sorted({*REQUEST_HEADERS, *RESPONSE_HEADERS, *REQUEST_BODIES, *RESPONSE_BODIES})


def rows_of(code: int) -> str:
    """Return the rows whose first cell contains the code."""
    return "\n".join(row for row in ROWS if str(code) in re.findall(r"\d+", row.split("|")[1]))


@pytest.mark.parametrize("code", CODES)
def test_the_document_has_the_name_and_the_bodies_of_each_request(code: int) -> None:
    kinds = [rocketmq_name(table[code]) for table in (REQUEST_BODIES, RESPONSE_BODIES) if code in table]
    kinds = [name for name in kinds if name != "ConsumeMessageDirectlyResult"]  # only consumers in Java send it

    rows = rows_of(code)

    assert RequestCode(code).name in rows
    assert [name for name in kinds if f"`{name}`" not in rows] == []


@pytest.mark.parametrize("code", sorted(set(CODES) - SENDS))
def test_the_document_has_the_header_fields_of_each_request(code: int) -> None:
    kinds = [table[code] for table in (REQUEST_HEADERS, RESPONSE_HEADERS) if code in table]
    names = {name for kind in kinds for _, name, _ in declared_fields(kind)} - {"bname"}

    rows = rows_of(code)

    assert {name for name in names if f"`{name}`" not in rows} == set()


@pytest.mark.parametrize("code", sorted(SENDS))
def test_the_document_has_the_header_fields_of_sends(code: int) -> None:
    names = {name for _, name, _ in declared_fields(REQUEST_HEADERS[code])} - {"bname"}

    assert {name for name in names if f"`{name}`" not in DOCUMENT} == set()
