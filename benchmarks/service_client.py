"""One client of `service.py`, in a process of its own: an ordinary program against a server.

    python benchmarks/service_client.py JSON

The argument is an `Errand`; the last line that is printed is what was measured, in seconds. It
prints `ready` when everything is set up, and begins when it is given a line.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

RANK = 32
BURST_TOKENS = 32
"""New tokens of each sample of the first burst with an adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Errand:
    case: str
    package: str
    """`tinsmith` or `tinker`; they are called alike."""
    url: str
    key: str
    model: str
    vocab_size: int
    count: int
    """Samples at once; of a batch, sequences."""
    length: int
    """Tokens of a prompt, or of a sequence."""
    new_tokens: int = 0
    rounds: int = 1
    seconds: float = 0.0
    """How long a tenant goes on."""
    seed: int = 0
    long_tokens: int = 0
    """Of one long sequence; others of `history` have a thirty-second of it."""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def main() -> None:
    client = Client(Errand(**json.loads(sys.argv[1])))
    work = CASES[client.errand.case](client)
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(work()))


Work = Callable[[], dict[str, Any]]


class Client:
    def __init__(self, errand: Errand) -> None:
        self.errand = errand
        self._sdk: Any = importlib.import_module(errand.package)
        self._service = self._sdk.ServiceClient(base_url=errand.url, api_key=errand.key)
        self._random = random.Random(errand.seed)

    # The cases: each sets up and returns what is then measured.

    def first(self) -> Work:
        """What a program feels that comes right after the server says that it is ready."""

        def work() -> dict[str, Any]:
            started = time.perf_counter()
            training = self._create()
            self._step(training, self._batch(2, 256 if self.errand.length >= 128 else 32))
            stepped = time.perf_counter()
            self._burst(self._service.create_sampling_client(base_model=self.errand.model), 1)
            sampled = time.perf_counter()
            self._burst(training.save_weights_and_get_sampling_client(), self.errand.count)
            burst = time.perf_counter()
            return {
                "step": stepped - started,
                "sample": sampled - stepped,
                "burst_with_adapter": burst - sampled,
            }

        return work

    def sample(self) -> Work:
        sampler = self._service.create_sampling_client(base_model=self.errand.model)

        def one_round() -> float:
            prompts = self._prompts(self.errand.count)
            started = time.perf_counter()
            tokens = self._sampled(sampler, prompts, self.errand.new_tokens)
            return tokens / (time.perf_counter() - started)

        def work() -> dict[str, Any]:
            return {"tokens_per_s": [one_round() for _ in range(self.errand.rounds)]}

        return work

    def train(self) -> Work:
        """A pass and a step, each pair waited for; and with the next sent before that."""
        training = self._create()
        data = self._batch(self.errand.count, self.errand.length)
        self._step(training, data)

        def work() -> dict[str, Any]:
            started = time.perf_counter()
            for _ in range(self.errand.rounds):
                self._step(training, data)
            waited = time.perf_counter()
            sent = [self._send_step(training, data) for _ in range(self.errand.rounds)]
            for futures in sent:
                for future in futures:
                    future.result()
            ended = time.perf_counter()
            num_tokens = self.errand.rounds * self.errand.count * self.errand.length
            return {
                "tokens_per_s": num_tokens / (waited - started),
                "sent_ahead_tokens_per_s": num_tokens / (ended - waited),
            }

        return work

    def tenant(self) -> Work:
        """A loop of its own: a pass and a step, waited for, for so many seconds, after as many that
        are not counted: each number of tenants that meet in a batch is captured by then."""
        training = self._create()
        data = self._batch(self.errand.count, self.errand.length)
        self._step(training, data)

        def loops() -> dict[str, Any]:
            started = time.perf_counter()
            num_loops = 0
            while time.perf_counter() - started < self.errand.seconds:
                self._step(training, data)
                num_loops += 1
            return {"loops": num_loops, "seconds": time.perf_counter() - started}

        def work() -> dict[str, Any]:
            loops()
            return loops()

        return work

    def history(self) -> Work:
        """Samples, then everything that takes memory, then the same samples."""
        sampler = self._service.create_sampling_client(base_model=self.errand.model)
        long = self.errand.long_tokens

        def rate() -> float:
            prompts = self._prompts(self.errand.count)
            started = time.perf_counter()
            tokens = self._sampled(sampler, prompts, self.errand.new_tokens)
            return tokens / (time.perf_counter() - started)

        def work() -> dict[str, Any]:
            rate()
            before = rate()
            training = self._create()
            self._step(training, self._batch(128, long // 32))
            one = self._batch(1, long)
            self._step(training, one)
            started = time.perf_counter()
            self._step(training, one)
            taken = time.perf_counter() - started
            small = self._batch(2, long // 32)
            for other in [self._create() for _ in range(8)]:
                self._step(other, small)
            rate()
            return {"before": before, "after": rate(), "long_tokens_per_s": long / taken}

        return work

    def save(self) -> Work:
        """From the call to a sampler that can be asked, for a model that has trained."""
        training = self._create()
        data = self._batch(1, 32)
        self._step(training, data)

        def one_round() -> float:
            self._step(training, data)
            started = time.perf_counter()
            training.save_weights_and_get_sampling_client()
            return time.perf_counter() - started

        def work() -> dict[str, Any]:
            return {"seconds": [one_round() for _ in range(self.errand.rounds)]}

        return work

    # What programs do

    def _create(self) -> Any:
        return self._service.create_lora_training_client(
            base_model=self.errand.model, rank=RANK, train_unembed=False
        )

    def _step(self, training: Any, data: list[Any]) -> None:
        for future in self._send_step(training, data):
            future.result()

    def _send_step(self, training: Any, data: list[Any]) -> list[Any]:
        adam = self._sdk.AdamParams(learning_rate=1e-4)
        return [training.forward_backward(data, "cross_entropy"), training.optim_step(adam)]

    def _burst(self, sampler: Any, count: int) -> None:
        self._sampled(sampler, self._prompts(count), BURST_TOKENS)

    def _sampled(self, sampler: Any, prompts: list[list[int]], new_tokens: int) -> int:
        """How many tokens came back."""
        sdk = self._sdk
        futures = [
            sampler.sample(
                sdk.ModelInput.from_ints(prompt),
                1,
                sdk.SamplingParams(max_tokens=new_tokens, stop=[], seed=number),
            )
            for number, prompt in enumerate(prompts)
        ]
        return sum(len(s.tokens) for future in futures for s in future.result().sequences)

    def _prompts(self, count: int) -> list[list[int]]:
        return [self._tokens(self.errand.length) for _ in range(count)]

    def _batch(self, count: int, length: int) -> list[Any]:
        sdk = self._sdk
        return [
            sdk.Datum(
                model_input=sdk.ModelInput.from_ints(tokens[:-1]),
                loss_fn_inputs={
                    "target_tokens": sdk.TensorData(data=tokens[1:], dtype="int64", shape=[length]),
                    "weights": sdk.TensorData(data=[1.0] * length, dtype="float32", shape=[length]),
                },
            )
            for tokens in (self._tokens(length + 1) for _ in range(count))
        ]

    def _tokens(self, length: int) -> list[int]:
        return [self._random.randrange(3, self.errand.vocab_size) for _ in range(length)]


CASES: dict[str, Callable[[Client], Work]] = {
    "first": Client.first,
    "sample": Client.sample,
    "train": Client.train,
    "tenant": Client.tenant,
    "save": Client.save,
    "history": Client.history,
}

if __name__ == "__main__":
    main()
