"""The import rules of docs/architecture.md, as contracts in pyproject.toml."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_imports_point_one_way() -> None:
    lint_imports = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run(
        [lint_imports, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_folder_lists_one_subject() -> None:
    """More than 26 modules in a folder are more than one subject."""
    folders = [f for f in (ROOT / "src" / "tinsmith").rglob("*") if f.is_dir()]
    sizes = {str(f.relative_to(ROOT)): len(list(f.glob("*.py"))) for f in folders}
    assert not {folder: size for folder, size in sizes.items() if size > 26}


def test_the_tests_of_the_server_have_its_folders() -> None:
    def folders(root: Path) -> set[str]:
        return {f.name for f in root.iterdir() if (f / "__init__.py").exists()}

    assert folders(ROOT / "tests" / "server") == folders(ROOT / "src" / "tinsmith" / "server")
