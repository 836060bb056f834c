"""Options of reads, writes and the pending view, and client files: what they mean, and the errors for wrong ones."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")

from mqtemplate.errors import ConfigurationError
from mqtemplate.spark.location.cluster_connection import connect
from mqtemplate.spark.location.location import BrokerLocation
from mqtemplate.spark.location.option_values import is_pending_view
from mqtemplate.spark.pending.reader import PendingOptions
from mqtemplate.spark.reader.options import SourceOptions
from mqtemplate.spark.sink.options import SinkOptions
from tests.golden import check_script, scripts_in

NEEDED = {"store": "/data", "topic": "orders"}


class Options:
    """Commands of the scripts: each prints what differs from the defaults, or the error."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def batch(self, *left_out: str, **options: str) -> Iterator[str]:
        """Parse the options of a batch, over ``store`` and ``topic``, unless these are left out."""
        return self._read(left_out, options, streaming=False)

    def stream(self, *left_out: str, **options: str) -> Iterator[str]:
        return self._read(left_out, options, streaming=True)

    def _read(self, left_out: tuple[str, ...], options: dict[str, str], *, streaming: bool) -> Iterator[str]:
        needed = {name: value for name, value in NEEDED.items() if name not in left_out}
        default = SourceOptions.parse(NEEDED, streaming=streaming)
        return _printed(lambda: SourceOptions.parse({**needed, **options}, streaming=streaming), default)

    def write(self, **options: str) -> Iterator[str]:
        default = SinkOptions.parse({"store": "/data"})
        return _printed(lambda: SinkOptions.parse(options), default)

    def pending(self, **options: str) -> Iterator[str]:
        def parse() -> PendingOptions:
            assert is_pending_view(options)
            return PendingOptions.parse(options)

        return _printed(parse, PendingOptions.parse({"store": "/data"}))

    def client_file(self, text: str = "") -> Iterator[str]:
        """Use a client file with this text; without a text it is missing."""
        path = self._folder / "client.json"
        if text:
            path.write_text(text)
        for line in _printed(
            lambda: connect(BrokerLocation(name_servers=("127.0.0.1:9",), client_file=str(path))), None
        ):
            yield line.replace(str(path), "FILE").replace(socket.gethostname(), "HOST")


def _printed(parse: Callable[[], Any], default: Any) -> Iterator[str]:
    try:
        found = parse()
    except ConfigurationError as exc:
        yield str(exc)
        return
    for field in dataclasses.fields(found):
        value = getattr(found, field.name)
        if value != getattr(default, field.name):
            yield f"{field.name} = {sorted(value, key=str) if isinstance(value, frozenset) else value!r}"


@pytest.mark.parametrize("path", scripts_in(Path(__file__).parent / "option_scripts"), ids=lambda path: path.stem)
def test_options_mean_what_their_script_says(path: Path, tmp_path: Path) -> None:
    check_script(path, Options(tmp_path))
