"""Every REST method of the official client that makes sense without billing, with its values."""

import datetime
import os
import urllib.request
import warnings

import tinker
from tinker import types

warnings.simplefilter("ignore")
MODEL = os.environ.get("MODEL", "tinsmith/fake")


def datum(tokens: list[int]) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )


service = tinker.ServiceClient(
    user_metadata={"experiment": "rest"}, project_id="p1", display_name="The Rest Test"
)
client = service.create_lora_training_client(
    base_model=MODEL, rank=4, seed=7, train_attn=False, user_metadata={"run": "one"}
)
session_id = client.model_id.partition(":")[0]
client.forward_backward([datum([1, 2, 3])], "cross_entropy").result()
client.optim_step(types.AdamParams()).result()
state = client.save_state("s1", ttl_seconds=7200, user_metadata={"k": "v"}).result().path
weights = client.save_weights_for_sampler("w1").result().path
external = client.save_weights_external("e1").result().path
assert external == f"tinker://{client.model_id}/external_weights/e1"
sampler = service.create_sampling_client(model_path=weights)

rest = tinker.RestClient()
run = rest.get_training_run(client.model_id).result()
assert (run.training_run_id, run.base_model, run.lora_rank) == (client.model_id, MODEL, 4)
assert run.last_checkpoint.tinker_path == state
assert run.last_sampler_checkpoint.tinker_path == weights
assert run.user_metadata == {"run": "one"} and not run.corrupted
assert rest.get_training_run_by_tinker_path(state).result().training_run_id == client.model_id
runs = rest.list_training_runs(limit=5).result()
assert [r.training_run_id for r in runs.training_runs] == [client.model_id]
assert (runs.cursor.offset, runs.cursor.limit, runs.cursor.total_count) == (0, 5, 1)
assert rest.list_training_runs(project_id="p1").result().cursor.total_count == 1
assert rest.list_training_runs(project_id="p2").result().training_runs == []

info = rest.get_weights_info_by_tinker_path(state).result()
assert (info.base_model, info.lora_rank, info.train_attn, info.train_mlp) == (MODEL, 4, False, True)

found = rest.list_checkpoints(client.model_id).result().checkpoints
assert [c.checkpoint_id for c in found] == [
    "external_weights/e1",
    "sampler_weights/w1",
    "weights/s1",
]
saved = found[2]
assert saved.user_metadata == {"k": "v"} and saved.size_bytes > 0 and not saved.public
assert abs((saved.expires_at - saved.time).total_seconds() - 7200) < 1
page = rest.list_user_checkpoints(limit=2, offset=1).result()
assert [c.checkpoint_id for c in page.checkpoints] == ["sampler_weights/w1", "weights/s1"]
assert page.cursor.total_count == 3

rest.publish_checkpoint_from_tinker_path(state).result()
rest.publish_checkpoint_from_tinker_path(state).result()
assert rest.list_checkpoints(client.model_id).result().checkpoints[2].public
rest.unpublish_checkpoint_from_tinker_path(state).result()
rest.set_checkpoint_ttl_from_tinker_path(state, None).result()
assert rest.list_checkpoints(client.model_id).result().checkpoints[2].expires_at is None
try:
    rest.set_checkpoint_ttl_from_tinker_path(state, 5).result()
except tinker.BadRequestError as error:
    assert "3600" in str(error)
else:
    raise AssertionError("a ttl of five seconds was accepted")

urls = rest.get_external_weights_urls(external).result()
assert "adapter_config.json" in urls.urls and urls.expires > datetime.datetime.now(datetime.UTC)
body = urllib.request.urlopen(urls.urls["adapter_config.json"]).read()
assert MODEL.encode() in body, body
forged = urls.urls["adapter_config.json"].replace("signature=", "signature=x")
try:
    urllib.request.urlopen(forged)
except urllib.error.HTTPError as error:
    assert error.code == 403
    error.close()
else:
    raise AssertionError("a forged URL was served")

copied = rest.copy_weights(state, "p3").result()
assert copied.startswith("tinker://copy-") and copied.endswith("/weights/s1")
resumed = service.create_training_client_from_state(copied)
first = resumed.forward([datum([1, 2, 3])], "cross_entropy").result().metrics
assert first == client.forward([datum([1, 2, 3])], "cross_entropy").result().metrics

session = rest.get_session(session_id).result()
assert session.training_run_ids == [client.model_id, resumed.model_id]
assert session.sampler_ids == [f"{session_id}:sample:0"]
assert session.user_metadata == {"experiment": "rest"}
assert session_id in rest.list_sessions().result().sessions
handle = rest.get_sampler(f"{session_id}:sample:0").result()
assert (handle.base_model, handle.model_path) == (MODEL, weights)
rest.assign_session_project(session_id, "p9").result()
search = types.SessionSearchRequest(project_ids=["p9"], display_name="test rest")
[summary] = rest.search_sessions(search).result().sessions
assert (summary.session_id, summary.project_id, summary.checkpoints_count) == (session_id, "p9", 3)
assert summary.status.type == "active" and summary.display_name == "The Rest Test"
nothing = types.SessionSearchRequest(user_metadata={"experiment": "other"})
assert rest.search_sessions(nothing).result().sessions == []

admin = tinker.AdminClient()
events = [e.event for e in admin.get_audit_log("checkpoints").result().entries]
assert events[0] == "checkpoint_copied" and events.count("checkpoint_published") == 2, events
hour = datetime.datetime.now(datetime.UTC).replace(minute=0, second=0, microsecond=0)
usage = admin.get_billing_usage(hour, hour + datetime.timedelta(hours=1)).result()
assert sum(e.event_info.token_count for e in usage.data if e.event_info.type == "training") == 6
assert all(e.estimated_cost_usd is None for e in usage.data)
assert usage.sessions[session_id].user_metadata == {"experiment": "rest"}
[stored] = admin.get_current_checkpoint_storage_usage().result().data
assert stored.checkpoint_count == 4 and stored.size_bytes > 0

rest.delete_checkpoint_from_tinker_path(state).result()
rest.delete_checkpoint(client.model_id, "external_weights/e1").result()
left = rest.list_checkpoints(client.model_id).result().checkpoints
assert [c.checkpoint_id for c in left] == ["sampler_weights/w1"]
try:
    rest.delete_checkpoint_from_tinker_path(state).result()
except tinker.NotFoundError as error:
    assert "no checkpoint" in str(error)
else:
    raise AssertionError("deleting twice succeeded")
assert len(sampler.compute_logprobs(types.ModelInput.from_ints([1, 2])).result()) == 2

service.close("success", "all done").result()
finished = types.SessionSearchRequest(session_id=session_id)
status = rest.search_sessions(finished).result().sessions[0].status
assert (status.type, status.reason.type, status.detail) == (
    "client_finished",
    "success",
    "all done",
)
print("ok")
