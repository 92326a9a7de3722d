"""The whole service: real clients over HTTP, and beside them the same jobs in the engine alone.

    python benchmarks/service.py [--device cuda --shape qwen3-0.6b] [--client official]
        [--cases first,sample,tenants,train,save,history] [--rounds N] [--out FILE]

The engine runs first, in a process that has ended when the server starts, so that each has the
device to itself. Then `first` is what a program feels that comes the moment a fresh server is
ready, `sample` are so many samples at once from one program, `tenants` are eight programs with a
loop of a pass and a step each, `train` is one with a large batch, `save` is
`save_weights_and_get_sampling_client` (in the engine: how long it holds others up), and `history`
are samples before and after a pass over 128 sequences, one over a single long sequence, and eight
more models. A ratio is HTTP over engine; the engine's rate for `tenants` and `train` has the steps
in it, and `of_passes_alone` is over its rate without them. Shapes have random weights; without one
it is SmolLM2-135M.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import reports
from service_client import Errand
from service_engine import EngineErrand, rounds_of
from serving import Server, serve
from tinsmith.engine.local.config import EMBEDDED_MODEL, EMBEDDED_SOURCE
from trainers import SHAPES, write_random_model

HERE = Path(__file__).parent
CASES = ("first", "sample", "tenants", "train", "save", "history")
TENANTS = 8
TENANT_SECONDS = 8.0
PACKAGES = {"ours": "tinsmith", "official": "tinker"}


@dataclass(frozen=True, slots=True)
class Sizes:
    samples: tuple[int, ...]
    prompt_tokens: int
    new_tokens: int
    tenant_batch: tuple[int, int]
    """Sequences and tokens of each."""
    train_batch: tuple[int, int]
    long_tokens: int
    """Of a single sequence."""


SIZES = {
    "cuda": Sizes((64, 256, 1024), 128, 256, (2, 256), (16, 1024), 32_768),
    "cpu": Sizes((4, 16, 64), 64, 32, (1, 32), (4, 128), 1024),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=tuple(SIZES), default="cpu")
    parser.add_argument("--shape", choices=tuple(SHAPES), help="random weights of this shape")
    parser.add_argument("--client", choices=tuple(PACKAGES), default="ours")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--samples", type=int, nargs="+", help="how many at once, case by case")
    parser.add_argument("--rounds", type=int, default=3, help="of samples; of 1,024 at once one")
    parser.add_argument("--serve-option", action="append", default=[], help="one of the server's")
    parser.add_argument("--out", type=Path, help="write the result to this file")
    arguments = parser.parse_args()
    cases = arguments.cases.split(",")
    if unknown := set(cases) - set(CASES):
        parser.error(f"no case called {', '.join(unknown)}; there are {', '.join(CASES)}")
    sizes = SIZES[arguments.device]
    with model_source(arguments.device, arguments.shape) as (model, source):
        samples = arguments.samples or list(sizes.samples)
        errand = engine_errand(arguments.device, model, source, cases, samples, arguments.rounds)
        engine = run_engine(errand)
        say("engine", engine["found"])
        options = ["--model", f"{model}={source}", "--device", arguments.device]
        with serve(*options, *arguments.serve_option) as server:
            package = PACKAGES[arguments.client]
            side = HttpSide(server, package, errand, engine["vocab_size"])
            over_http = {case: side.measure(case) for case in cases}
    result = {
        "shape": arguments.shape or "SmolLM2-135M",
        "client": arguments.client,
        "server_ready_s": round(server.ready_after, 2),
        **{case: compared(over_http[case], engine["found"].get(case)) for case in cases},
    }
    print_table(result)
    reports.write_report(arguments.out, result, engine["machine"])


@contextlib.contextmanager
def model_source(device: str, shape: str | None) -> Iterator[tuple[str, str]]:
    """The model's name and where its files are, for as long as the run takes."""
    if shape is None:
        yield EMBEDDED_MODEL, EMBEDDED_SOURCE
        return
    with tempfile.TemporaryDirectory(prefix="tinsmith-bench-model-") as folder:
        started = time.perf_counter()
        write_random_model(Path(folder), shape, device)
        say("model", f"written in {time.perf_counter() - started:.0f} s")
        yield f"random/{shape}", folder


def engine_errand(
    device: str, model: str, source: str, cases: list[str], samples: list[int], rounds: int
) -> EngineErrand:
    sizes = SIZES[device]
    return EngineErrand(
        device=device,
        model=model,
        source=source,
        cases=cases,
        samples=samples,
        prompt_tokens=sizes.prompt_tokens,
        new_tokens=sizes.new_tokens,
        tenants=TENANTS,
        tenant_batch=sizes.tenant_batch,
        train_batch=sizes.train_batch,
        rounds=rounds,
    )


def run_engine(errand: EngineErrand) -> dict[str, Any]:
    if not {"sample", "tenants", "train", "save"} & set(errand.cases):
        errand = EngineErrand(**{**json.loads(errand.to_json()), "cases": []})
    command = [sys.executable, str(HERE / "service_engine.py"), errand.to_json()]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


class HttpSide:
    """Programs against the server, each a process of its own."""

    def __init__(self, server: Server, package: str, errand: EngineErrand, vocab_size: int) -> None:
        self._server = server
        self._package = package
        self._engine = errand
        self._vocab_size = vocab_size

    def measure(self, case: str) -> dict[str, Any]:
        found: dict[str, Any] = getattr(self, case)()
        say(case, found)
        return found

    def first(self) -> dict[str, Any]:
        count = 64 if self._engine.device == "cuda" else 8
        (taken,) = self._run([self._errand("first", count, self._engine.prompt_tokens)])
        return {f"{name}_s": round(seconds, 2) for name, seconds in taken.items()}

    def sample(self) -> dict[str, Any]:
        """By how many at once; the first round of each is told apart."""
        return {str(count): self._sample(count) for count in self._engine.samples}

    def _sample(self, count: int) -> dict[str, float]:
        engine = self._engine
        errand = self._errand(
            "sample",
            count,
            engine.prompt_tokens,
            new_tokens=engine.new_tokens,
            rounds=rounds_of(count, engine.rounds) + 1,
        )
        cpu = self._server.cpu_seconds()
        (found,) = self._run([errand])
        cpu = self._server.cpu_seconds() - cpu
        return {
            "tokens_per_s": round(statistics.median(found["tokens_per_s"][1:]), 1),
            "first_tokens_per_s": round(found["tokens_per_s"][0], 1),
            "server_cpu_ms_per_sample": round(cpu / (count * errand.rounds) * 1e3, 2),
        }

    def tenants(self) -> dict[str, Any]:
        sequences, length = self._engine.tenant_batch
        found = self._run(
            [
                self._errand("tenant", sequences, length, seconds=TENANT_SECONDS, seed=number)
                for number in range(self._engine.tenants)
            ]
        )
        loops = sum(each["loops"] / each["seconds"] for each in found)
        return {"tokens_per_s": round(loops * sequences * length)}

    def train(self) -> dict[str, Any]:
        sequences, length = self._engine.train_batch
        (found,) = self._run([self._errand("train", sequences, length, rounds=6)])
        return {name: round(rate) for name, rate in found.items()}

    def save(self) -> dict[str, Any]:
        (found,) = self._run([self._errand("save", 1, 32, rounds=7)])
        return {"seconds": round(statistics.median(found["seconds"]), 3)}

    def history(self) -> dict[str, Any]:
        count, sizes = self._engine.samples[-1], SIZES[self._engine.device]
        errand = self._errand(
            "history",
            min(256, count),
            self._engine.prompt_tokens,
            new_tokens=self._engine.new_tokens,
            long_tokens=sizes.long_tokens,
        )
        (found,) = self._run([errand])
        return {
            "tokens_per_s": round(found["before"], 1),
            "tokens_per_s_afterwards": round(found["after"], 1),
            "after_over_before": round(found["after"] / found["before"], 3),
            "long_tokens_per_s": round(found["long_tokens_per_s"], 1),
        }

    def _errand(self, case: str, count: int, length: int, **more: Any) -> Errand:
        return Errand(
            case=case,
            package=self._package,
            url=self._server.url,
            key=self._server.key,
            model=self._engine.model,
            vocab_size=self._vocab_size,
            count=count,
            length=length,
            **more,
        )

    def _run(self, errands: list[Errand]) -> list[dict[str, Any]]:
        """Start the programs, let all begin when the last is ready, and wait for what they say."""
        script = str(HERE / "service_client.py")
        processes = [
            subprocess.Popen(
                [sys.executable, script, errand.to_json()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for errand in errands
        ]
        try:
            for process in processes:
                assert process.stdout is not None
                if process.stdout.readline() != "ready\n":
                    raise SystemExit("a client failed; its error is above")
            for process in processes:
                assert process.stdin is not None
                process.stdin.write("\n")
                process.stdin.flush()
            return [json.loads(process.communicate()[0].splitlines()[-1]) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()


def compared(http: dict[str, Any], engine: dict[str, Any] | None) -> dict[str, Any]:
    """The figures of both sides and their ratios, for a case or each of its sizes."""
    if engine is None:
        return http
    if all(isinstance(part, dict) for part in engine.values()):
        return {size: compared(http[size], engine[size]) for size in http}
    both = {**http, **{f"engine_{name}": value for name, value in engine.items()}}
    if "tokens_per_s" not in engine:
        return both
    return {
        **both,
        "ratio": round(http["tokens_per_s"] / engine["tokens_per_s"], 3),
        **(
            {"of_passes_alone": round(http["tokens_per_s"] / engine["passes_tokens_per_s"], 3)}
            if "passes_tokens_per_s" in engine
            else {}
        ),
    }


def print_table(result: dict[str, Any]) -> None:
    for case, found in result.items():
        if case == "sample":
            for count, figures in found.items():
                print(f"{case} {count:>5} ", _words(figures))
        else:
            print(f"{case:12}", _words(found) if isinstance(found, dict) else found)


def _words(figures: dict[str, Any]) -> str:
    return "  ".join(f"{name} {value}" for name, value in figures.items())


def say(what: str, found: object) -> None:
    """Figures as they come: a run that is cut short has shown what it knew."""
    print(json.dumps({what: found}), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
