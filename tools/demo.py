"""What `make demo` runs: `tinsmith demo`, after a look at the Python that runs it."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036  # the environment may be older than the project
    sys.exit(
        f"Tinsmith needs Python 3.11 or later and this is {sys.version.split()[0]}; "
        "remove .venv and run: make demo PYTHON=python3.11"
    )

from tinsmith.cli.__main__ import main

if __name__ == "__main__":
    main(["demo", *sys.argv[1:]])
