"""The benchmark suite: every part, or those named, each in a process of its own (`make bench`).

    python benchmarks/run.py [PART …]

What a part prints is shown; its report goes to `benchmarks/results/DATE-PART.json`, and
`make schema` then writes `docs/performance.md` from the newest of each. The parts for CUDA run
where there is such a device.
"""

from __future__ import annotations

import argparse
import datetime
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
PARTS: dict[str, tuple[str, ...]] = {
    "codec": ("foundation.py",),
    "client": ("client_speed.py",),
    "server": ("server_overhead.py",),
    "console": ("console.py",),
    "machine": ("machine.py",),
    "training": ("training.py",),
    "tenants": ("tenants.py",),
    "neighbours": ("neighbours.py",),
    "sampling": ("sampling.py",),
    "service": ("service.py",),
    "on_policy": ("on_policy.py",),
    "loop": ("whole_loop.py",),
    "growth": ("growth.py",),
    "recovery": ("recovery.py",),
    "engines": ("engines.py",),
    "elsewhere": ("elsewhere.py",),
    "replicas": ("replicas.py",),
}
ON_CUDA: dict[str, tuple[str, ...]] = {
    f"{part}-cuda-{shape}": (f"{part}.py", "--device", "cuda", "--shape", shape)
    for part in ("training", "tenants", "sampling", "service", "on_policy")
    for shape in ("qwen3-0.6b", "qwen3-4b")
}


def main() -> None:
    every = PARTS | ON_CUDA
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(every))
    arguments = parser.parse_args()
    unknown = set(arguments.parts) - set(every)
    if unknown:
        parser.error(f"no part called {', '.join(sorted(unknown))}; there are {', '.join(every)}")
    for part in arguments.parts or PARTS:
        script, *options = every[part]
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        target = HERE / "results" / f"{today}-{part}.json"
        print(f"== {part}: {script} {' '.join(options)}".rstrip(), flush=True)
        command = [sys.executable, str(HERE / script), *options, "--out", str(target)]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
