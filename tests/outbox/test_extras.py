"""The package without the libraries that it is for."""

from __future__ import annotations

import subprocess
import sys

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
