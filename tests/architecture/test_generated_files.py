"""Files that are generated from the code are fresh."""

import importlib.util
from pathlib import Path

import jsonschema
import pytest

from tinsmith.wire.schema import schema, schema_text

ROOT = Path(__file__).parents[2]


def test_the_schema_in_the_repository_is_the_generated_one() -> None:
    """S2: run `make schema` after changing a type."""
    assert (ROOT / "docs" / "reference" / "schema.json").read_text() == schema_text()


@pytest.mark.parametrize("tool", sorted(path.name for path in (ROOT / "tools").glob("write_*.py")))
def test_a_generated_page_is_fresh(tool: str) -> None:
    """Run `make schema` after changing what the page is generated from."""
    spec = importlib.util.spec_from_file_location("page", ROOT / "tools" / tool)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.TARGET.read_text() == module.page()
    charts = module.charts() if hasattr(module, "charts") else {}
    for name, svg in charts.items():
        assert (module.TARGET.with_suffix("") / f"{name}.svg").read_text() == svg, name


def test_the_schema_is_a_valid_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())


def test_every_reference_in_the_schema_leads_somewhere() -> None:
    document = schema()
    names = set(document["$defs"])
    text = schema_text()
    referred = {part.split('"')[0] for part in text.split("#/$defs/")[1:]}
    assert referred <= names
