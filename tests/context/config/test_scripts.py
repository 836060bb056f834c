"""Golden scripts of the configuration: files, variables and arguments, and the settings or the error that they give."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.context.config_script import check_config_script
from tests.golden import scripts_in

FEATURES = {"spellings": ("C7",)}


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(path, marks=[pytest.mark.feature(each) for each in FEATURES.get(path.stem, ())], id=path.stem)
        for path in scripts_in(Path(__file__).parent / "scripts")
    ],
)
def test_configurations_give_what_the_script_says(script: Path, tmp_path: Path) -> None:
    check_config_script(script, tmp_path)
