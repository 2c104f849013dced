"""docs/models.md is up to date."""

from pathlib import Path

from tests.unit.models.models_table import page

ROOT = Path(__file__).parents[3]


def test_the_page_of_models_is_up_to_date():
    found = (ROOT / "docs" / "models.md").read_text()
    assert found == page(), "run: python -m tests.unit.models.models_table > docs/models.md"
