"""Listeners in a notebook: the cells of docs/notebooks.md, in a real kernel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs.fences import fences
from tests.waiting import PATIENCE_S

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.timeout(180),
]
manager = pytest.importorskip("jupyter_client.manager", reason="no kernel, which is in the extra test: make setup")
pytest.importorskip("ipykernel", reason="no kernel, which is in the extra test: make setup")

PAGE = Path(__file__).parents[2] / "docs" / "notebooks.md"


class Kernel:
    """A kernel of Jupyter, and the output of its cells.

    Attributes:
        output: Id of a cell -> the text in its output, of all its executions.
    """

    def __init__(self, client: Any) -> None:
        self.client = client
        self.output: dict[str, str] = defaultdict(str)
        self._cells: dict[str, str] = {}

    def run(self, cell: str, code: str) -> None:
        """Run a cell, and wait until it is done."""
        content = {"code": code, "silent": False, "store_history": True, "user_expressions": {}, "allow_stdin": False}
        request = self.client.session.msg("execute_request", content, metadata={"cellId": cell})
        self._cells[request["header"]["msg_id"]] = cell
        self.client.shell_channel.send(request)
        reply = self.client.get_shell_msg(timeout=PATIENCE_S)
        assert reply["content"]["status"] == "ok", reply["content"]

    def wait_for_output(self, cell: str, text: str) -> None:
        """Wait until a text is in the output of a cell."""
        while text not in self.output[cell]:
            message = self.client.get_iopub_msg(timeout=PATIENCE_S)
            if message["msg_type"] == "stream":
                self.output[self._cells[message["parent_header"]["msg_id"]]] += message["content"]["text"]


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    """A new kernel that works in an empty folder."""
    started, client = manager.start_new_kernel(kernel_name="python3", cwd=str(tmp_path))
    try:
        yield Kernel(client)
    finally:
        client.stop_channels()
        started.shutdown_kernel(now=True)


def test_a_listener_prints_in_the_cell_of_its_application_also_after_the_cell_ran_again(kernel: Kernel) -> None:
    define, send = [block.text for block in fences(PAGE) if block.language == "python"]

    kernel.run("define", define)
    kernel.run("send", send)
    kernel.wait_for_output("define", "received: hello")
    kernel.run("define", define.replace("received:", "edited:"))
    kernel.run("send", send)
    kernel.wait_for_output("define", "edited: hello")

    assert kernel.output["define"].count("hello") == 2
