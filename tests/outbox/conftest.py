"""Databases: SQLite, and a real PostgreSQL where Debian's server is installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from mqtemplate.outbox import outbox_tables
from tests.kit import kit
from tests.outbox.postgres import binaries, postgres_server

__all__ = ["engine", "kit", "postgres", "url"]


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """URL of a PostgreSQL server."""
    if binaries() is None:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    with postgres_server() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of an empty database that has the tables of outbox and inbox, and ``orders``."""
    url = f"sqlite:///{tmp_path}/shop.db" if request.param == "sqlite" else request.getfixturevalue("postgres")
    engine = sa.create_engine(url)
    metadata = sa.MetaData()
    outbox_tables(metadata)
    sa.Table("orders", metadata, sa.Column("id", sa.Integer, primary_key=True), sa.Column("state", sa.Text))
    metadata.drop_all(engine)
    metadata.create_all(engine)
    yield url
    engine.dispose()


@pytest.fixture
def engine(url: str) -> Iterator[sa.Engine]:
    """Engine of the database."""
    engine = sa.create_engine(url)
    yield engine
    engine.dispose()
