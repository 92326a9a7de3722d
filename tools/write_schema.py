"""Write the JSON schema of all messages to docs/reference/schema.json (`make schema`)."""

from __future__ import annotations

from pathlib import Path

from tinsmith.wire.schema import schema_text

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "reference" / "schema.json"


def page() -> str:
    return schema_text()


if __name__ == "__main__":
    TARGET.write_text(page())
    print(f"wrote {TARGET.relative_to(ROOT)}")
