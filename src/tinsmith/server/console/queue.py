"""Where a run stands: what of it is waiting, who is served before it, and why."""

from __future__ import annotations

from tinsmith.server.operations.live_model import LiveModel
from tinsmith.server.service import Service
from tinsmith.types.observing import RunQueueResponse


def standing(service: Service, model: LiveModel | None) -> RunQueueResponse:
    """`model` is None for a run that nobody has used for a while."""
    if model is None:
        return RunQueueResponse(waiting=0, ahead_tokens=0, reason="nothing of this run is waiting")
    reason = _obstacle(service, model)
    if reason is not None:
        return RunQueueResponse(waiting=len(model.queue), ahead_tokens=0, reason=reason)
    num_ahead, tokens = service.scheduler.ahead_of(model)
    others = "1 other run is" if num_ahead == 1 else f"{num_ahead} other runs are"
    return RunQueueResponse(
        waiting=len(model.queue),
        place=num_ahead + 1,
        ahead_tokens=tokens,
        reason=f"{others} served first" if num_ahead else "it is this run's turn",
    )


def _obstacle(service: Service, model: LiveModel) -> str | None:
    """Why the run does not wait for its turn; None when it does."""
    if model.failure is not None:
        return model.failure.message
    if not len(model.queue):
        return "it is running" if model.is_busy else "nothing of this run is waiting"
    if (trouble := service.trouble) is not None:
        return trouble
    if model.is_busy:
        return "it is running"
    if missing := model.queue.missing():
        numbers = ", ".join(map(str, missing))
        return f"it waits for operation {numbers}, which has not arrived"
    return None
