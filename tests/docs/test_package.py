"""The wheel and the source distribution, as a package index gets them, in an environment without Spark."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from email.parser import HeaderParser
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.docs.fences import ROOT, fences

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.timeout(600),  # an environment and its downloads
    pytest.mark.skipif(find_spec("build") is None or find_spec("hatchling") is None, reason="no build and hatchling"),
]


def run(*command: str | Path, folder: Path) -> str:
    """Run a command; return its output."""
    done = subprocess.run(list(map(str, command)), cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the source distribution, and with the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, folder=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(distributions: Path) -> Path:
    [wheel] = distributions.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def clean_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of a new environment with the wheel and what it needs, without extras."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", folder / "venv", folder=folder)
    python = folder / "venv" / "bin" / "python"
    pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    probe = subprocess.run([*pip, "download", "--no-deps", "typer", "--dest", folder], check=False, capture_output=True)
    if probe.returncode:
        pytest.skip("pip reaches no package index")
    run(*pip, "install", wheel, folder=folder)
    return python


def test_the_metadata_has_what_an_index_shows(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        text = archive.read(name).decode()
    metadata = HeaderParser().parsestr(text)

    urls = dict(value.split(", ") for value in metadata.get_all("Project-URL", []))
    assert {"Homepage", "Documentation", "Changelog", "Issues", "Source"} == set(urls)
    assert metadata["Author"]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    assert not [name for name in metadata.get_all("Requires-Dist", []) if "spark" in name and "extra" not in name]


def test_the_wheel_has_the_library_and_its_starters_only(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
        names = archive.namelist()

    starters = {path.parent.name for path in (ROOT / "starters").glob("*/py.typed")}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"mqtemplate", *starters}
    assert "mqtemplate/py.typed" in names


def test_the_source_distribution_has_the_tests_and_the_documents(distributions: Path) -> None:
    [source] = distributions.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        names = {re.sub(r"^[^/]+/", "", name) for name in archive.getnames()}

    for name in ("pyproject.toml", "README.md", "LICENSE", "SECURITY.md", "Makefile", "tests/docs/test_package.py"):
        assert name in names
    assert "docs/site/mkdocs.yml" in names
    assert not [name for name in names if name.startswith((".venv", ".rocketmq", "build/"))]


def test_the_program_of_the_readme_runs_in_a_clean_environment(clean_python: Path, tmp_path: Path) -> None:
    """Without Spark, and without a line on standard error that the README does not show."""
    readme = fences(ROOT / "README.md")
    (tmp_path / "application.yml").write_text(next(f.text for f in readme if f.language == "yaml"), "utf-8")
    (tmp_path / "app.py").write_text(next(f.text for f in readme if f.language == "python"), "utf-8")

    assert "received: two seconds later" in run(clean_python, "-W", "error", "app.py", folder=tmp_path)
    assert "pyspark" not in run(clean_python, "-m", "pip", "list", folder=tmp_path).lower()


def test_a_new_project_runs_its_check_in_a_clean_environment(clean_python: Path, tmp_path: Path) -> None:
    command = clean_python.parent / "mqtemplate"

    run(command, "init", "shop", folder=tmp_path)

    assert "app is valid" in run(command, "run", "app", "--check", folder=tmp_path / "shop")
