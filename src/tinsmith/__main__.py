"""`python -m tinsmith`, and the entry point of the `tinsmith` command."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from tinsmith.cli.__main__ import main as run
    except ModuleNotFoundError as error:
        from tinsmith import extras

        if error.name not in extras.packages("cli"):
            raise
        sys.exit(
            f"tinsmith: the command needs the extra 'cli' ({error.name} is not installed): "
            f"{extras.install_line('cli')}"
        )
    run()


if __name__ == "__main__":
    main()
