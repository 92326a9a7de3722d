"""The loop of every method: steps, evaluations, checkpoints, and a way back.

Resuming goes on with the optimizer's state and the batches that an uninterrupted run would have
had. A failure that a new client may not meet is dealt with here; after any other, and after
Ctrl-C, the run's folder knows how to go on.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tinsmith.cli.training import conversation
from tinsmith.cli.training.checkpoints import Checkpoints
from tinsmith.cli.training.display import Display
from tinsmith.cli.training.interruption import Interruption
from tinsmith.cli.training.methods import Method
from tinsmith.cli.training.run_folder import Progress, RunFolder, rounded
from tinsmith.cli.training.schedule import learning_rate
from tinsmith.cli.training.trackers import Tracker
from tinsmith.client import run_log
from tinsmith.client.recovery import Recovery
from tinsmith.types import AdamParams, ModelInput, SamplingParams

if TYPE_CHECKING:
    from tinsmith.client.sampling import SamplingClient
    from tinsmith.client.service import ServiceClient
    from tinsmith.client.training import TrainingClient


class Stopped(Exception):
    """The user wanted it to end; everything up to here is saved."""


@dataclass
class Loop:
    service: ServiceClient
    model: str
    folder: RunFolder
    display: Display
    trackers: tuple[Tracker, ...]
    interruption: Interruption
    progress: Progress = field(default_factory=Progress)

    def run(self, method: Method[Any, Any]) -> Progress:
        """From the last checkpoint to the end; what was left to do, and nothing twice."""
        self.progress = self.folder.progress()
        self.folder.save(self.progress)
        recovery = Recovery(self.service, start=self._new_client, on_recovery=self._recovering)
        recovery.path, recovery.next_step = self.progress.state_path, self.progress.step
        if self.progress.is_finished:
            return self.progress
        for attempt in recovery.attempts():
            with attempt as (training, _):
                self.progress = self.folder.progress()
                self.folder.drop_metrics_after(self.progress.step)
                self._link(training)
                try:
                    self._train(method, training, recovery)
                finally:
                    run_log.wait_for_all()
        return self.progress

    # --- one attempt --------------------------------------------------------------------------

    def _train(
        self, method: Method[Any, Any], training: TrainingClient, recovery: Recovery
    ) -> None:
        settings, progress = self.folder.settings, self.progress
        checkpoints = Checkpoints(self.folder)
        if progress.step == 0:
            if settings.start is not None and progress.start_path is None:
                progress.start_path = checkpoints.save_start(training)
                self.folder.save(progress)
            self._sample(method, "before", method.world.start_sampler())
        num_steps = method.num_steps
        while progress.step < num_steps:
            line, own = self._step(method, training, num_steps)
            is_last = progress.step == num_steps
            if method.held_out and (is_last or progress.step % settings.eval_every == 0):
                own |= method.evaluate(training)
                line |= own
                is_last = self._judged(method, training, checkpoints, line) or is_last
            line = {name: rounded(value) for name, value in line.items()}
            self.folder.add_metrics(line)
            for tracker in self.trackers:
                tracker.log(line)
            self._post(training, own)
            self.display.step(progress.step, num_steps, line)
            wants_end = self.interruption.is_wanted
            if is_last:
                self._sample(method, "after", training.save_weights_and_get_sampling_client())
            if is_last or wants_end or progress.step % settings.save_every == 0:
                saved = checkpoints.save(training, progress, is_last=is_last)
                recovery.saved(saved, progress.step)
            if is_last:
                return
            if wants_end:
                raise Stopped

    def _step(
        self, method: Method[Any, Any], training: TrainingClient, num_steps: int
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Metrics of the next step, which is taken; and those that only the method knows."""
        started = time.monotonic()
        step = self.progress.step
        rate = self._rate(step, num_steps)
        batch = method.batch(step, training)
        line: dict[str, float] = {"step": step + 1, **batch.metrics, "learning_rate": rate}
        for number in range(batch.num_passes if batch.data else 0):
            passed = training.forward_backward(batch.data, batch.loss_fn)
            stepped = training.optim_step(AdamParams(learning_rate=rate))
            total = passed.result().metrics["loss:sum"]
            stepped.result()
            if number == 0 and batch.loss_divisor:
                line["loss"] = total / batch.loss_divisor
        num_tokens = sum(datum.model_input.length for datum in batch.data) + len(batch.data)
        line["tokens_per_second"] = num_tokens / (time.monotonic() - started)
        self.progress.step = step + 1
        return line, dict(batch.metrics)

    def _judged(
        self,
        method: Method[Any, Any],
        training: TrainingClient,
        checkpoints: Checkpoints,
        line: dict[str, float],
    ) -> bool:
        """Keep the weights if they are the best so far; True when patience has run out."""
        value, best = rounded(line[method.watched]), self.progress.best
        if best is None or (value > best.value if method.is_higher_better else value < best.value):
            checkpoints.save_best(training, self.progress, value)
            self.progress.num_worse = 0
            return False
        self.progress.num_worse += 1
        patience = self.folder.settings.patience
        return patience is not None and self.progress.num_worse >= patience

    def _rate(self, step: int, num_steps: int) -> float:
        settings = self.folder.settings
        warm_up = settings.warm_up
        if warm_up is None:
            warm_up = min(10, max(1, num_steps // 10))
        return learning_rate(settings.learning_rate, step, num_steps, warm_up, settings.schedule)

    def _sample(self, method: Method[Any, Any], when: str, sampler: SamplingClient) -> None:
        prompts = method.prompts()
        if not prompts:
            return
        tokenizer = method.world.tokenizer
        params = SamplingParams(
            max_tokens=self.folder.settings.sample_tokens,
            temperature=0.0,
            stop=conversation.end_tokens(tokenizer) or None,
        )
        futures = [sampler.sample(ModelInput.from_ints(each), 1, params) for each in prompts]
        answers = [future.result().sequences[0].tokens for future in futures]
        self.folder.save_samples(
            {
                "prompt": [conversation.reply_text(tokenizer, each) for each in prompts],
                when: [conversation.reply_text(tokenizer, each) for each in answers],
            }
        )

    # --- clients ------------------------------------------------------------------------------

    def _new_client(self) -> TrainingClient:
        settings = self.folder.settings
        about = {"name": settings.name or "", "made_by": f"tinsmith train {self.folder.method}"}
        if settings.start is not None:
            return self.service.create_training_client_from_state(
                settings.start, user_metadata=about
            )
        return self.service.create_lora_training_client(
            self.model, rank=settings.rank, seed=settings.seed, user_metadata=about
        )

    def _link(self, training: TrainingClient) -> None:
        """Where the run can be watched."""
        if self._has_console(training):
            self.display.note(f"watch it at {training.get_console_url()}")

    def _post(self, training: TrainingClient, own: dict[str, float]) -> None:
        """Add to the run's curves what the server does not know: rewards, evaluations."""
        if own and self._has_console(training):
            run_log.log(own, self.progress.step, run=training)

    def _has_console(self, training: TrainingClient) -> bool:
        """Whether the server it runs on is one of ours, which shows runs and takes metrics."""
        console = urlsplit(training.get_console_url()).netloc
        return console == urlsplit(self.service.config.base_url).netloc

    def _recovering(self, error: BaseException, step: int) -> None:
        self.display.note(f"failed ({error}); going on from step {step}")
