"""The pages of ``docs/architecture`` name exactly the modules that exist."""

import pytest

from tests.docs import module_tables

_ADVICE = "run python -m tests.docs.module_tables --write"


@pytest.mark.parametrize("page", module_tables.pages())
def test_a_page_names_the_modules_that_exist(page: str) -> None:
    """The failure tells which names are missing, and which name no module."""
    existing, named = set(module_tables.modules(page)), module_tables.named(page)

    missing, unknown = sorted(existing - named), sorted(named - existing)
    assert not missing, f"docs/architecture/{page}.md lacks {', '.join(missing)}; {_ADVICE}"
    assert not unknown, f"docs/architecture/{page}.md names {', '.join(unknown)}, which do not exist; {_ADVICE}"
    assert module_tables.is_current(page), f"docs/architecture/{page}.md has other texts than the docstrings; {_ADVICE}"
