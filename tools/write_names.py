"""Write src/tinsmith/__init__.pyi: the public names as type checkers see them.

`tinsmith/__init__.py` loads names on use from one table, which a type checker cannot follow.
"""

from __future__ import annotations

from pathlib import Path

import tinsmith

TARGET = Path(__file__).parents[1] / "src" / "tinsmith" / "__init__.pyi"


def page() -> str:
    imports = [
        "from {} import {}".format(*module.rpartition(".")[::2])
        for module in tinsmith.MODULES.values()
    ]
    for module, names in tinsmith.NAMES.items():
        imports.append(f"from {module} import (")
        imports += [f"    {name}," for name in names]
        imports.append(")")
    lines = [
        "# Made by tools/write_names.py from the table in __init__.py, in the order of the table.",
        "# ruff: noqa: I001",
        "",
        *imports,
        "",
        "__title__: str",
        "__version__: str",
        "MODULES: dict[str, str]",
        "NAMES: dict[str, tuple[str, ...]]",
        "",
        "__all__ = [",
        *(f'    "{name}",' for name in tinsmith.__all__),
        "]",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    TARGET.write_text(page())
