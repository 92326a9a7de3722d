"""A loop that goes on after the service has failed it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.scripted_server import Answer
from tinsmith.client.recovery import Recovery, RecoveryPolicy, is_recoverable
from tinsmith.client.service import ServiceClient
from tinsmith.errors import BadRequestError, RequestFailedError
from tinsmith.types import AdamParams


def run(recovery: Recovery, steps: int, fail_at: dict[int, Exception]) -> list[int]:
    done = []
    for attempt in recovery.attempts():
        with attempt as (training, first_step):
            for step in range(first_step, steps):
                if step in fail_at:
                    raise fail_at.pop(step)
                training.optim_step(AdamParams()).result(10)
                done.append(step)
                if step % 3 == 2:
                    saved = training.save_state(f"step-{step}").result(10)
                    recovery.saved(saved, step + 1)
    return done


def failed() -> RequestFailedError:
    from tinsmith.types import RequestErrorCategory

    return RequestFailedError("engine died", "r", RequestErrorCategory.Server)


def test_it_goes_on_from_the_newest_checkpoint(stub: Any, service: ServiceClient) -> None:
    told, slept = [], list[float]()
    recovery = Recovery(
        service,
        start=lambda: service.create_lora_training_client("m"),
        on_recovery=lambda error, step: told.append((str(error), step)),
        sleep=slept.append,
    )
    assert run(recovery, 8, {1: failed(), 5: failed()}) == [0, 0, 1, 2, 3, 4, 3, 4, 5, 6, 7]
    assert told == [("engine died", 0), ("engine died", 3)]
    assert slept == [10.0, 10.0], "a save in between counts as progress"
    loads = [r.json() for r in stub.seen("/load_weights")]
    assert [each["path"] for each in loads] == ["tinker://s1:train:1/weights/step-2"]
    assert loads[0]["optimizer"] is True


def test_it_gives_up_when_nothing_helps(stub: Any, service: ServiceClient) -> None:
    slept: list[float] = []
    recovery = Recovery(
        service,
        start=lambda: service.create_lora_training_client("m"),
        policy=RecoveryPolicy(max_attempts=3, delay_seconds=1.0),
        sleep=slept.append,
    )
    stub.on(
        "/api/v1/optim_step",
        lambda request: stub.promise(Answer(200, {"error": "no", "category": "server"})),
    )
    with pytest.raises(RequestFailedError):
        run(recovery, 2, {})
    assert slept == [1.0, 2.0]


@pytest.mark.parametrize("error", [ZeroDivisionError(), KeyboardInterrupt()])
def test_errors_of_the_loop_itself_are_raised_at_once(
    service: ServiceClient, error: BaseException
) -> None:
    recovery = Recovery(service, start=lambda: service.create_lora_training_client("m"))
    with pytest.raises(type(error)):
        run(recovery, 2, {0: error})  # type: ignore[dict-item]


def test_the_users_mistakes_are_raised_at_once(stub: Any, service: ServiceClient) -> None:
    recovery = Recovery(service, start=lambda: service.create_lora_training_client("m"))
    stub.on("/api/v1/optim_step", Answer(400, {"detail": "rank"}))
    with pytest.raises(BadRequestError) as caught:
        run(recovery, 2, {})
    assert not is_recoverable(caught.value)


def test_a_later_process_goes_on_from_a_path(stub: Any, service: ServiceClient) -> None:
    recovery = Recovery(
        service,
        start=lambda: service.create_lora_training_client("m"),
        path="tinker://x/weights/old",
        next_step=6,
    )
    assert run(recovery, 8, {}) == [6, 7]
    assert stub.seen("/load_weights")[0].json()["path"] == "tinker://x/weights/old"


def test_it_goes_on_in_a_new_session_when_the_old_one_was_ended(
    stub: Any, service: ServiceClient
) -> None:
    """Refusals in a dead session look like the user's mistakes, and are not."""
    recovery = Recovery(
        service,
        start=lambda: service.create_lora_training_client("m"),
        sleep=lambda seconds: None,
    )
    over: set[str] = set()

    def beat(request: Any) -> Answer:
        return Answer(410 if request.json()["session_id"] in over else 200, {})

    def optim_step(request: Any) -> Any:
        session = request.json()["model_id"].split(":")[0]
        if session == "s1" and request.json()["seq_id"] == 6:
            over.add(session)
        if session in over:
            return Answer(400, {"detail": "session s1 is finished; start another"})
        return stub._do_optim_step(request)

    stub.on("/api/v1/session_heartbeat", beat)
    stub.on("/api/v1/optim_step", optim_step)
    assert run(recovery, 6, {}) == [0, 1, 2, 3, 3, 4, 5]
    assert stub.count("/create_session") == 2
    (loaded,) = stub.seen("/load_weights")
    assert loaded.json()["path"] == "tinker://s1:train:0/weights/step-2"
    assert not service.session_has_ended(), "the new one lives"


def test_a_refusal_in_a_living_session_is_the_users(stub: Any, service: ServiceClient) -> None:
    recovery = Recovery(service, start=lambda: service.create_lora_training_client("m"))
    stub.on("/api/v1/optim_step", Answer(400, {"detail": "no"}))
    with pytest.raises(BadRequestError, match="no"):
        run(recovery, 2, {})
    assert stub.count("/create_session") == 1
