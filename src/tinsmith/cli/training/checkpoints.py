"""The checkpoints of a run: states to go on from, the best weights, the last; few of them kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinsmith.cli.training.run_folder import Best, Progress, RunFolder
from tinsmith.client.rest import RestClient
from tinsmith.errors import NotFoundError

if TYPE_CHECKING:
    from tinsmith.client.sampling import SamplingClient
    from tinsmith.client.service import ServiceClient
    from tinsmith.client.training import TrainingClient
    from tinsmith.types import SaveWeightsResponse


@dataclass(frozen=True, slots=True)
class Checkpoints:
    folder: RunFolder

    def save(
        self, training: TrainingClient, progress: Progress, *, is_last: bool
    ) -> SaveWeightsResponse:
        """Save the state, note it in the run's folder, and only then delete what it replaces."""
        name = "final" if is_last else f"step-{progress.step:06d}"
        state = training.save_state(name, self._ttl_seconds, overwrite=True)
        if is_last:
            sampler = training.save_weights_for_sampler(name, self._ttl_seconds)
            progress.sampler_path = sampler.result().path
        saved = state.result()
        progress.state_path = saved.path
        progress.kept.append(saved.path)
        keep = self.folder.settings.keep
        progress.obsolete += progress.kept[:-keep]
        progress.kept = progress.kept[-keep:]
        if is_last and progress.start_path is not None:
            progress.obsolete.append(progress.start_path)
        self.folder.save(progress)
        self._delete(progress.obsolete)
        progress.obsolete = []
        return saved

    def save_start(self, training: TrainingClient) -> str:
        """Weights that answers are compared with while the run lasts."""
        saved = training.save_weights_for_sampler("start", self._ttl_seconds)
        return saved.result().path

    def save_best(self, training: TrainingClient, progress: Progress, value: float) -> None:
        """Those of the best evaluation so far."""
        name = f"best-{progress.step:06d}"
        path = training.save_weights_for_sampler(name, self._ttl_seconds).result().path
        if progress.best is not None:
            progress.obsolete.append(progress.best.path)
        progress.best = Best(progress.step, value, path)

    @property
    def _ttl_seconds(self) -> int | None:
        hours = self.folder.settings.ttl_hours
        return None if hours is None else round(hours * 3600)

    def _delete(self, paths: Sequence[str]) -> None:
        rest = RestClient()
        for path in paths:
            try:
                rest.delete_checkpoint_from_tinker_path(path).result()
            except NotFoundError:
                continue  # its time was over, or somebody was quicker


@dataclass
class Start:
    """The weights that a run began with."""

    service: ServiceClient
    model: str
    folder: RunFolder
    _sampler: SamplingClient | None = None

    def sampler(self) -> SamplingClient:
        if self._sampler is None:
            path = self.folder.progress().start_path
            self._sampler = (
                self.service.create_sampling_client(base_model=self.model)
                if path is None
                else self.service.create_sampling_client(model_path=path)
            )
        return self._sampler
