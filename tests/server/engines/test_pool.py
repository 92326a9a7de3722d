"""Several engines behind one server: who trains where, and what a death costs the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args, get_type_hints

import pytest

from tests.support.slots import Gate, base_sampler, engine_in, sampler_of, slot_of, train
from tinsmith.errors import ValidationError
from tinsmith.server.config import ServerConfig
from tinsmith.server.config_sources import build_config
from tinsmith.server.engines.placement import SAMPLING_SLACK
from tinsmith.server.engines.plan import SlotPlan, slot_plans

if TYPE_CHECKING:
    from tests.support.in_process_server import StartServer


# Training


async def test_models_are_spread_over_the_engines(start_server: StartServer) -> None:
    server = await start_server(engines=3)
    models = [await server.api.model() for _ in range(6)]
    assert sorted(slot_of(server, model).number for model in models) == [0, 0, 1, 1, 2, 2]
    held = [(await (await engine_in(server, n)).health()).num_adapters for n in range(3)]
    assert held == [2, 2, 2]


async def test_neighbours_go_on_while_an_engine_is_rebuilt(start_server: StartServer) -> None:
    gate = Gate()
    server = await start_server(engines=2, before_start=gate.wait)
    api = server.api
    first, second = [await api.model() for _ in range(2)]
    await train(api, first, 1, 2)
    await train(api, second, 1, 2)
    undisturbed = await api.loss(second, 5)

    assert slot_of(server, first).number == 0
    gate.is_open.clear()
    (await engine_in(server, 0)).die("killed by a test")
    held_up = await api.send_pass(first, 5)
    await train(api, second, 6, 5)
    assert await api.loss(second, 16) < undisturbed
    assert slot_of(server, first).number == 0 and not slot_of(server, first).is_up

    gate.is_open.set()
    assert (await api.output(held_up)).metrics["loss:sum"] == undisturbed, "nothing was lost"


async def test_an_idle_model_is_rebuilt_where_an_engine_is_up(start_server: StartServer) -> None:
    gate = Gate()
    server = await start_server(engines=2, before_start=gate.wait)
    model = await server.api.model()
    await train(server.api, model, 1, 2)
    before = await server.api.loss(model, 5)
    gate.is_open.clear()
    (await engine_in(server, 0)).die("killed by a test")
    live = server.service.models.find(model)
    assert live is not None
    await server.until(lambda: live.slot is None, 30)
    assert await server.api.loss(model, 6) == before
    assert slot_of(server, model).number == 1
    gate.is_open.set()


async def test_an_engine_that_starts_leaves_what_another_is_writing(
    start_server: StartServer,
) -> None:
    server = await start_server(engines=2)
    weights = server.service.weights
    async with weights.new() as (_, folder):
        draft, stray = (folder.with_name(f".{name}.draft") for name in (folder.name, "stray"))
        draft.mkdir()
        stray.mkdir()
        (await engine_in(server, 0)).die("killed by a test")
        await server.until(lambda: server.service.engines.num_restarts == 1, 30)
        assert draft.exists() and not stray.exists()


# Sampling


async def test_what_was_frozen_is_sampled_where_it_is_and_elsewhere_when_that_is_busy(
    start_server: StartServer,
) -> None:
    server = await start_server(engines=2)
    api = server.api
    model = await api.model()
    sampler = await sampler_of(api, model, 1)
    home, other = await engine_in(server, 0), await engine_in(server, 1)
    first = await api.sample(sampler, 0)
    assert ((await home.health()).num_samplers, (await other.health()).num_samplers) == (1, 0)

    slot_of(server, model).num_jobs += SAMPLING_SLACK + 1
    second = await api.sample(sampler, 1)
    assert (await other.health()).num_samplers == 1
    assert second.sequences[0].tokens == first.sequences[0].tokens


async def test_prompts_that_begin_alike_are_sampled_in_one_place(
    start_server: StartServer,
) -> None:
    server = await start_server(engines=4)
    sampler = await base_sampler(server.api)
    beginning = list(range(64))
    prompts = [[*beginning, n] for n in range(6)]
    for number, tokens in enumerate(prompts):
        prompt = {"chunks": [{"type": "encoded_text", "tokens": tokens}]}
        await server.api.sample(sampler, number, prompt=prompt)
    decoded = [(await (await engine_in(server, n)).health()).decoded_tokens for n in range(4)]
    assert sum(count > 0 for count in decoded) == 1


async def test_engines_that_only_train_or_only_sample(start_server: StartServer) -> None:
    server = await start_server(engine_roles="train,sample")
    api = server.api
    models = [await api.model() for _ in range(3)]
    assert {slot_of(server, model).number for model in models} == {0}
    sampler = await sampler_of(api, models[0], 1)
    await api.sample(sampler, 0)
    trains, samples = [await (await engine_in(server, n)).health() for n in range(2)]
    assert (trains.num_adapters, trains.num_samplers, trains.decoded_tokens) == (3, 0, 0)
    assert (samples.num_adapters, samples.num_samplers) == (0, 1) and samples.decoded_tokens > 0


# Which slots there are


def test_devices_and_roles_are_dealt_out_in_turns() -> None:
    plans = slot_plans(
        build_config(
            {"engines": "4", "devices": "cuda:0, cuda:1", "engine_roles": "train,train,sample,both"}
        )
    )
    assert [(p.device, p.role, p.num_on_device) for p in plans] == [
        ("cuda:0", "train", 2),
        ("cuda:1", "train", 2),
        ("cuda:0", "sample", 2),
        ("cuda:1", "both", 2),
    ]


@pytest.mark.parametrize(
    "device", get_args(get_type_hints(ServerConfig, include_extras=True)["device"])
)
def test_every_device_that_a_server_can_be_told_has_a_slot(device: str) -> None:
    assert slot_plans(build_config({"device": device})) == (SlotPlan(device=device),)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"engines": 0}, "engines: must be from 1 to 256, got 0"),
        ({"devices": "gpu1"}, "devices: expected auto, cpu, mps, cuda or cuda:NUMBER, got 'gpu1'"),
        ({"devices": "cpu,cuda:0", "engines": 1}, "devices: names 2 for 1 engines"),
        ({"devices": "cpu,cuda:0", "deterministic": True}, "devices: a deterministic server needs"),
        ({"engine_roles": "train"}, "engine_roles: no engine would sample; add sample or both"),
        ({"engine_roles": "learn"}, "engine_roles: expected train, sample or both, got 'learn'"),
    ],
)
def test_slots_that_cannot_be_are_refused(settings: dict[str, object], problem: str) -> None:
    with pytest.raises(ValidationError) as raised:
        slot_plans(build_config(settings))
    assert str(raised.value).startswith(problem)
