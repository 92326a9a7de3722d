"""What the metrics say while a sample is under way."""

from __future__ import annotations

from tests.server.conftest import MODEL, StartServer


async def test_tokens_are_counted_while_they_are_decoded(start_server: StartServer) -> None:
    server = await start_server(fake_token_seconds=0.02)
    session = await server.api.session()
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
    sampler = (await server.api.ok("/create_sampling_session", body))["sampling_session_id"]
    params = {"max_tokens": 2000, "seed": 5}
    wanted = server.api.sample_body(sampler, num_samples=8, sampling_params=params)
    await server.api.ok("/asample", wanted)
    await server.until(lambda: server.service.engines.health.decoded_tokens > 0)
    shown = server.service.metrics.render().decode()
    assert "tinsmith_running_samples 1.0" in shown, "it is not over yet"
    assert "tinsmith_sampled_tokens_total 0.0" in shown
    assert "tinsmith_engine_decoded_tokens 0.0" not in shown
