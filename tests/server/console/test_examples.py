"""Examples and samplers: what a run was trained on, where that is wanted, and what it gave."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tests.support.in_process_server import MODEL, datum

if TYPE_CHECKING:
    from tests.support.in_process_server import Api, StartServer


async def _examples(api: Api, run: str, **query: Any) -> Any:
    response = await api.get(f"/training_runs/{run}/examples", **query)
    assert response.status_code == 200, response.text
    return response.json()


async def test_no_example_is_kept_unless_the_server_is_told_to(api: Api) -> None:
    run = await api.model()
    await api.result(await api.send_pass(run, 1))
    assert await _examples(api, run) == {"examples": [], "is_recorded": False}


async def test_a_few_sequences_of_each_pass_are_kept_with_what_is_known_of_each_token(
    start_server: StartServer,
) -> None:
    server = await start_server(keep_examples=2)
    api = server.api
    run = await api.model()
    output = await api.output(
        await api.send_pass(run, 1, datum(1, 2, 3), datum(4, 5, 6, 7), datum(8, 9))
    )
    await api.result(await api.send_pass(run, 2, datum(8, 9)))
    shown = await _examples(api, run, step=1)
    assert shown["is_recorded"] and [e["ids"] for e in shown["examples"]] == [[2, 3], [5, 6, 7]]
    first = shown["examples"][0]
    assert first["tokens"] == ["2", "3"], "the fake model has no tokenizer"
    assert (first["weights"], first["length"], first["step"]) == ([1.0, 1.0], 2, 1)
    assert first["logprobs"] == output.loss_fn_outputs[0]["logprobs"].tolist()
    assert [e["step"] for e in (await _examples(api, run))["examples"]] == [2, 1, 1]


async def test_the_first_answers_of_a_sampler_are_kept_under_the_operation_that_froze_it(
    start_server: StartServer,
) -> None:
    server = await start_server(keep_examples=3)
    api = server.api
    session = await api.session()
    run = await api.create_model(session)
    frozen = {"model_id": run, "seq_id": 1, "sampling_session_seq_id": 5}
    unnamed = await api.result((await api.ok("/save_weights_for_sampler", frozen))["request_id"])
    first = await api.sample(unnamed["sampling_session_id"], 0, num_samples=2)
    second = await api.sample(unnamed["sampling_session_id"], 1, num_samples=2)
    shown = (await _examples(api, run, step=1))["examples"]
    assert [e["source"] for e in shown] == ["sampled"] * 3, "a few of four"
    answers = [*first.sequences, *second.sequences][:3]
    assert [e["ids"] for e in shown] == [answer.tokens for answer in answers]
    assert [e["logprobs"] for e in shown] == [answer.logprobs for answer in answers]
    assert shown[0]["prompt_ids"] == [1, 2, 3] and shown[0]["prompt"] == ["1", "2", "3"]
    assert shown[0]["stop_reason"] == answers[0].stop_reason

    named = {"model_id": run, "seq_id": 2, "path": "mine"}
    path = (await api.result((await api.ok("/save_weights_for_sampler", named))["request_id"]))[
        "path"
    ]
    created = {"session_id": session, "sampling_session_seq_id": 6, "model_path": path}
    sampler = (await api.ok("/create_sampling_session", created))["sampling_session_id"]
    await api.sample(sampler, 0)
    assert [e["source"] for e in (await _examples(api, run, step=2))["examples"]] == ["sampled"]


async def test_answers_of_a_base_model_or_without_being_asked_for_are_not_kept(
    start_server: StartServer,
) -> None:
    for keep, base_model in ((0, None), (3, MODEL)):
        server = await start_server(keep_examples=keep)
        api = server.api
        session = await api.session()
        run = await api.create_model(session)
        if base_model is None:
            body = {"model_id": run, "seq_id": 1, "sampling_session_seq_id": 5}
            asked = await api.ok("/save_weights_for_sampler", body)
            sampler = (await api.result(asked["request_id"]))["sampling_session_id"]
        else:
            created = {"session_id": session, "sampling_session_seq_id": 5}
            made = await api.ok("/create_sampling_session", {**created, "base_model": base_model})
            sampler = made["sampling_session_id"]
        await api.sample(sampler, 0)
        assert (await _examples(api, run))["examples"] == []
        await server.stop()


async def test_an_owners_examples_take_no_more_than_his_share(start_server: StartServer) -> None:
    server = await start_server(keep_examples=1, key_max_example_bytes=1000)
    api, other = server.api, await server.other_user()
    run, others = await api.model(), await other.model()
    await other.result(await other.send_pass(others, 1))
    for number in range(1, 40):
        await api.result(await api.send_pass(run, number))
    found = await server.service.store.examples.of_run(run, None, 100)
    assert 0 < sum(example.num_bytes for example in found) <= 1000
    assert found[0].seq_id == 39, "the newest is there"
    assert len((await _examples(other, others))["examples"]) == 1, "nobody else's had to go"


async def test_a_runs_samplers_tell_how_much_how_long_and_how_likely(
    start_server: StartServer,
) -> None:
    server = await start_server()
    api = server.api
    session = await api.session()
    run = await api.create_model(session)
    body = {"model_id": run, "seq_id": 1, "sampling_session_seq_id": 5}
    frozen = await api.result((await api.ok("/save_weights_for_sampler", body))["request_id"])
    sampler = frozen["sampling_session_id"]
    logprobs: list[float] = []
    lengths: list[int] = []
    stops = 0
    for number in range(3):
        sampled = await api.sample(sampler, number, num_samples=2)
        await server.service.tidy()
        for sequence in sampled.sequences:
            logprobs += sequence.logprobs or []
            lengths.append(len(sequence.tokens))
            stops += sequence.stop_reason == "stop"
    found = (await api.get(f"/training_runs/{run}/samplers")).json()["samplers"]
    assert [(one["sampler"], one["seq"]) for one in found] == [(sampler, 1)]
    one = found[0]
    assert (one["requests"], one["sequences"], one["prompt_tokens"]) == (3, 6, 9)
    assert (one["sampled_tokens"], one["longest"]) == (sum(lengths), max(lengths))
    assert one["stopped_fraction"] == stops / 6
    assert math.isclose(one["mean_logprob"], sum(logprobs) / len(logprobs), rel_tol=1e-6)
    usage = (await api.get("/console/usage", by="run")).json()["usage"]
    assert [(u["by"], u["sampled_tokens"]) for u in usage] == [(run, sum(lengths))]


async def test_usage_is_told_by_run_model_and_day(start_server: StartServer) -> None:
    server = await start_server()
    api = server.api
    run = await api.model()
    await api.result(await api.send_pass(run, 1))
    saved = await api.ok("/save_weights", {"model_id": run, "seq_id": 2, "path": "mine"})
    await api.result(saved["request_id"])
    for by in ("run", "model", "day"):
        usage = (await api.get("/console/usage", by=by)).json()["usage"]
        assert [u["training_tokens"] for u in usage] == [4], by
    by_run = (await api.get("/console/usage", by="run")).json()["usage"]
    assert by_run[0]["by"] == run and by_run[0]["stored_bytes"] > 0
    refused = await api.get("/console/usage", by="hour")
    assert refused.status_code == 400 and "run, model, day" in refused.json()["detail"]
