"""Files that are generated from the code are fresh."""

from pathlib import Path

import jsonschema

from tinsmith.wire.schema import schema, schema_text

ROOT = Path(__file__).parents[2]


def test_the_schema_in_the_repository_is_the_generated_one() -> None:
    """S2: run `make schema` after changing a type."""
    assert (ROOT / "docs" / "reference" / "schema.json").read_text() == schema_text()


def test_the_schema_is_a_valid_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())


def test_every_reference_in_the_schema_leads_somewhere() -> None:
    document = schema()
    names = set(document["$defs"])
    text = schema_text()
    referred = {part.split('"')[0] for part in text.split("#/$defs/")[1:]}
    assert referred <= names
