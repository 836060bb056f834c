"""Golden scripts of the settings as the brokers need them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.context.config_script import check_config_script
from tests.golden import scripts_in


@pytest.mark.parametrize("script", scripts_in(Path(__file__).parent / "scripts"), ids=lambda path: path.stem)
def test_brokers_get_what_the_script_says(script: Path, tmp_path: Path) -> None:
    check_config_script(script, tmp_path)
