"""The package without the libraries that it is for."""

from __future__ import annotations

import inspect
import subprocess
import sys

import mqtemplate.outbox
from mqtemplate.outbox import OutboxSession
from mqtemplate.template import SendOptions

WITHOUT_SQLALCHEMY = """
import sys
sys.modules["sqlalchemy"] = None
import mqtemplate.outbox
try:
    mqtemplate.outbox.SQLAlchemyOutbox
except ModuleNotFoundError as error:
    print(error)
"""


def test_without_sqlalchemy_the_error_names_the_package() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_SQLALCHEMY], capture_output=True, text=True, check=True)

    assert "SQLAlchemyOutbox needs SQLAlchemy" in done.stdout
    assert 'pip install "sqlalchemy[asyncio]>=2.0"' in done.stdout


def test_the_signature_of_a_send_names_each_send_option() -> None:
    """As those of the template do, in ``help()`` and in notebooks."""
    sends = [mqtemplate.outbox.SQLAlchemyOutbox.send, mqtemplate.outbox.AsyncSQLAlchemyOutbox.send, OutboxSession.send]

    options = list(SendOptions.__annotations__)
    for send in sends:
        assert list(inspect.signature(send).parameters)[-len(options) :] == options
