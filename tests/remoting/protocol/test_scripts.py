"""Frames, headers and bodies of any peer: what is read from them, and the texts of errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqtemplate.errors import RemoteProtocolError
from mqtemplate.remoting.protocol import FrameDecoder, decode_command
from tests.golden import check_script, scripts_in
from tests.remoting.protocol.code_tables import BODIES, HEADERS
from tests.remoting.protocol.test_codec import head, json_frame


class Protocol:
    """The commands of the scripts."""

    def start(self, data: str) -> Iterator[str]:
        """Print the error for the first bytes of a frame."""
        yield from self._start(bytes.fromhex(data))

    def start_text(self, data: str) -> Iterator[str]:
        yield from self._start(data.encode().decode("unicode_escape").encode())

    def _start(self, data: bytes) -> Iterator[str]:
        decoder = FrameDecoder()
        decoder.feed(data)
        with pytest.raises(RemoteProtocolError) as refused:
            decoder.next_command()
        assert decoder.buffered == 0
        yield str(refused.value)

    def json(self, header: str) -> Iterator[str]:
        """Print the command with a JSON header, or the error."""
        yield from self._frame(json_frame(json.loads(header)))

    def binary(self, *words: str) -> Iterator[str]:
        """Print the command with a binary header, or the error."""
        data = bytes.fromhex("".join(words))
        yield from self._frame(head(4 + len(data), 1, len(data)) + data)

    def _frame(self, frame: bytes) -> Iterator[str]:
        try:
            yield str(decode_command(frame))
        except RemoteProtocolError as exc:
            yield str(exc)

    def body(self, name: str, text: str) -> Iterator[str]:
        """Print a body as it is written, or the error."""
        try:
            yield BODIES[name].decode(text.encode()).encode().decode()
        except RemoteProtocolError as exc:
            yield str(exc)

    def header(self, name: str, **fields: str) -> Iterator[str]:
        """Print a header as it is written, or the error."""
        try:
            yield " ".join(
                f"{key}={text}" for key, text in HEADERS[name].from_ext_fields(fields).to_ext_fields().items()
            )
        except RemoteProtocolError as exc:
            yield str(exc)


@pytest.mark.usefixtures("json_library")
@pytest.mark.parametrize("script", scripts_in(Path(__file__).with_name("scripts")), ids=lambda path: path.stem)
def test_the_protocol_does_what_the_script_says(script: Path) -> None:
    check_script(script, Protocol())
