"""Write the JSON schema of all messages to docs/reference/schema.json (`make schema`)."""

from __future__ import annotations

from pathlib import Path

from tinsmith.wire.schema import schema_text

TARGET = Path(__file__).parents[1] / "docs" / "reference" / "schema.json"

if __name__ == "__main__":
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text(schema_text())
    print(f"wrote {TARGET.relative_to(Path.cwd())}")
