"""A cell of a notebook that runs again replaces its application."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mqtemplate import MQApplication, message_listener
from mqtemplate.errors import StoreLockedError


class NotebookSession:
    """Session of a notebook: what IPython's shell says of the cell that runs.

    Attributes:
        cell: Id of the cell, as JupyterLab and VS Code send it; None for an editor that sends none.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cell: str | None = "cell-1"
        self.execution_count = 1
        self.started: list[MQApplication] = []

    def get_parent(self) -> dict[str, Any]:
        return {"metadata": {} if self.cell is None else {"cellId": self.cell}}

    def run_cell(self, *components: object, folder: str = "data") -> MQApplication:
        self.execution_count += 1
        return self.start(*components, folder=folder)

    def start(self, *components: object, folder: str = "data") -> MQApplication:
        app = self.create(*components, folder=folder)
        app.start()
        return app

    def create(self, *components: object, folder: str = "data") -> MQApplication:
        app = MQApplication(
            *components,
            config_folder=self.folder,
            settings={"rocketmq.name-server": f"embedded:{self.folder / folder}"},
            starters=None,
        )
        self.started.append(app)
        return app


@pytest.fixture
def session(tmp_path: Path) -> Iterator[NotebookSession]:
    """Code outside of interactive sessions, until `notebook` is requested."""
    session = NotebookSession(tmp_path)
    yield session
    for app in session.started:
        app.stop()


@pytest.fixture
def notebook(session: NotebookSession, monkeypatch: pytest.MonkeyPatch) -> NotebookSession:
    """The same in a notebook."""
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: session))
    return session


@message_listener(topic="orders", consumer_group="billing")
def bill(order: str) -> None:
    pass


@message_listener(topic="orders", consumer_group="audit")
def audit(order: str) -> None:
    pass


def test_a_cell_that_runs_again_replaces_its_application(notebook: NotebookSession) -> None:
    """Both own the same folder, so the old one has to be stopped first."""
    first = notebook.run_cell(bill)

    second = notebook.run_cell(bill)

    assert not first.is_ready.is_set()
    assert second.is_ready.is_set()
    assert second.template.sync_send("orders", "1").msg_id


def test_an_edited_cell_replaces_its_application(notebook: NotebookSession) -> None:
    """The id of the cell is the same, although the components are others."""
    first = notebook.run_cell(bill)

    second = notebook.run_cell(bill, audit)

    assert not first.is_ready.is_set()
    assert len(second.containers) == 2


def test_without_ids_of_cells_the_same_components_and_broker_are_replaced(notebook: NotebookSession) -> None:
    notebook.cell = None
    first, other = notebook.run_cell(bill), notebook.run_cell(bill, folder="other")

    second = notebook.run_cell(bill)

    assert [app.is_ready.is_set() for app in (first, other, second)] == [False, True, True]


def test_applications_of_one_execution_and_of_other_cells_go_on(notebook: NotebookSession) -> None:
    first = notebook.run_cell(bill)
    beside = notebook.start(bill, folder="beside")
    notebook.cell = "cell-2"

    other = notebook.run_cell(bill, folder="other")

    assert all(app.is_ready.is_set() for app in (first, beside, other))


def test_an_application_that_is_only_created_replaces_none(notebook: NotebookSession) -> None:
    first = notebook.run_cell(bill)
    notebook.execution_count += 1

    notebook.create(bill)

    assert first.is_ready.is_set()


def test_a_start_with_await_replaces_too(notebook: NotebookSession) -> None:
    first = notebook.run_cell(bill)
    notebook.execution_count += 1
    second = notebook.create(bill)

    async def cell() -> bool:
        async with second:
            return second.is_ready.is_set()

    assert asyncio.run(cell())
    assert not first.is_ready.is_set()


def test_an_error_of_the_old_application_does_not_keep_the_new_one_from_starting(
    notebook: NotebookSession, caplog: pytest.LogCaptureFixture
) -> None:
    class Pool:
        def on_stop(self) -> None:
            raise OSError("the pool is broken")

    notebook.run_cell(Pool)

    second = notebook.run_cell(Pool)

    assert second.is_ready.is_set()
    assert "application.stop_failed" in caplog.text
    assert "the pool is broken" in caplog.text
    with pytest.raises(ExceptionGroup):
        second.stop()


def test_at_the_prompt_of_python_a_repeated_statement_replaces_its_application(
    session: NotebookSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    first = session.run_cell(bill)

    assert session.run_cell(bill).is_ready.is_set()
    assert not first.is_ready.is_set()


def test_a_program_replaces_nothing(session: NotebookSession) -> None:
    first = session.run_cell(bill)

    with pytest.raises(StoreLockedError):
        session.run_cell(bill)

    assert first.is_ready.is_set()
