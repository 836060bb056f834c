"""Commands in errors that install the packages of an extra."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from mqtemplate.extras import install_command

ROOT = Path(__file__).parents[1]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]


@pytest.mark.parametrize("extra", ["spark", "spark-jre", "sqlalchemy", "dashboard", "reload"])
def test_the_command_names_the_packages_of_the_extra(extra: str) -> None:
    """It works without an index that has mqtemplate, however mqtemplate was installed."""
    command = install_command(extra)

    found = re.findall(r'"([a-z0-9-]+)(?:\[[a-z]+\])?[^"]*"', command)
    assert command.startswith("pip install ")
    assert sorted(found) == sorted(re.match(r"[a-z0-9-]+", each)[0] for each in EXTRAS[extra])  # type: ignore[index]
    assert "mqtemplate" not in command


def test_a_marker_of_a_package_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = [
        "core>=1",
        "a<3,>=2; extra == 'fast'",
        'b; (python_version < "3.13") and extra == "fast"',
        "c; extra == 'faster'",
    ]
    monkeypatch.setattr("importlib.metadata.requires", lambda name: declared)

    assert install_command("fast") == """pip install "a<3,>=2" "b; (python_version < '3.13')\""""


def test_a_source_folder_that_is_not_installed_has_a_command_for_a_clone(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> list[str]:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.requires", requires)

    assert install_command("spark") == 'pip install ".[spark]" in a clone of mqtemplate'


def test_no_error_and_no_page_asks_for_an_install_from_an_index() -> None:
    """The distribution is on no index yet: a page installs a clone or a wheel, an error names the packages."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]
    modules = [*ROOT.glob("mqtemplate/**/*"), *ROOT.glob("starters/**/*"), *ROOT.glob("examples/**/*.py")]
    texts = {path: path.read_text("utf-8") for path in pages + modules if path.suffix in (".md", ".py", ".txt")}

    assert len(texts) > 100
    from_an_index = re.compile(r"""pip install\s+(?:-\S+ )*['"`]?mqtemplate\b(?!-)""")
    assert [path.name for path, text in texts.items() if from_an_index.search(text)] == []
