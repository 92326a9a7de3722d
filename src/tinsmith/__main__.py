"""`python -m tinsmith`, and the entry point of the `tinsmith` command."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from tinsmith.cli.__main__ import main as run
    except ModuleNotFoundError as error:
        if error.name not in ("click", "rich"):
            raise
        sys.exit(
            f"tinsmith: the command needs the package {error.name!r}, which a plain install leaves "
            "out. Install it with: pip install 'tinsmith[cli]' (or 'tinsmith[all]' to serve models)"
        )
    run()


if __name__ == "__main__":
    main()
