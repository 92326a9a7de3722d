"""Every query of the dashboard finds something in what a server that did work tells Prometheus."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

import tinsmith
from tests.support.in_process_server import PROBE
from tests.support.server_process import ServerProcess, serving
from tinsmith.server.metrics import COUNTERS, GAUGES, HISTOGRAMS, PREFIX

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "tinsmith.json"

_WORDS = {"by", "le", "rate", "sum", "deriv", "clamp_min", "histogram_quantile"}
"""What our queries are made of beside metrics and labels."""


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text("utf-8"))["panels"]
    return found


QUERIES = {
    f"{panel['title']} {target['refId']}": target["expr"]
    for panel in panels()
    for target in panel["targets"]
}


@pytest.fixture(scope="module")
def busy_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that has trained, sampled and refused."""
    with serving(tmp_path_factory.mktemp("busy")) as server:
        work(server)
        yield server


def work(server: ServerProcess) -> None:
    with tinsmith.ServiceClient(base_url=server.url, api_key=server.key) as service:
        name = service.get_server_capabilities().supported_models[0].model_name
        training = service.create_lora_training_client(name, rank=4, seed=1)
        training.forward_backward(PROBE, "cross_entropy").result(60)
        training.optim_step(tinsmith.AdamParams(learning_rate=0.1)).result(60)
        sampler = training.save_weights_and_get_sampling_client()
        params = tinsmith.SamplingParams(max_tokens=4, seed=1)
        sampler.sample(tinsmith.ModelInput.from_ints([1, 2]), 1, params).result(60)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{server.url}/api/v1/training_runs", timeout=60)
    refused.value.close()


def scrape(server: ServerProcess) -> dict[str, set[str]]:
    """The name of each series that the server tells, and the labels that it has."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.mark.parametrize("query", QUERIES.values(), ids=QUERIES)
def test_the_metrics_and_labels_of_a_panel_are_told(busy_server: ServerProcess, query: str) -> None:
    told = scrape(busy_server)
    metrics = re.findall(rf"{PREFIX}\w+", query)
    assert metrics and set(metrics) <= set(told)
    grouped = re.findall(r"by \(([^)]*)\)", query)
    labels = {label.strip() for group in grouped for label in group.split(",")}
    assert all(labels <= told[name] for name in metrics)
    others = set(re.findall(r"[a-z_]+(?=[\s(])", re.sub(r"\[[^]]*\]", "", query))) - set(metrics)
    assert others <= _WORDS, "a word that is neither a metric nor one of ours"


def test_every_number_that_a_panel_shows_has_a_description_and_no_panel_lies_on_another() -> None:
    known = {PREFIX + name for name in (*COUNTERS, *HISTOGRAMS, *GAUGES)}
    places = set()
    for panel in panels():
        assert panel["description"].endswith(".")
        text = " ".join(target["expr"] for target in panel["targets"])
        names = re.findall(rf"{PREFIX}\w+?(?=_(?:total|bucket|sum|count)\b|\b)", text)
        assert set(names) <= known
        box = panel["gridPos"]
        cells = {(box["x"] + dx, box["y"] + dy) for dx in range(box["w"]) for dy in range(box["h"])}
        assert not cells & places and max(x for x, _ in cells) < 24
        places |= cells


def test_the_dashboard_reads_from_the_source_that_is_provisioned() -> None:
    folder = DEPLOY / "grafana" / "provisioning"
    sources = yaml.safe_load((folder / "datasources" / "prometheus.yaml").read_text("utf-8"))
    (source,) = sources["datasources"]
    assert {panel["datasource"]["uid"] for panel in panels()} == {source["uid"]}
    providers = yaml.safe_load((folder / "dashboards" / "tinsmith.yaml").read_text("utf-8"))
    path = providers["providers"][0]["options"]["path"]
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))
    assert f"./grafana/dashboards:{path}:ro" in compose["services"]["grafana"]["volumes"]
    assert source["url"] == "http://prometheus:9090" and "prometheus" in compose["services"]


@contextlib.contextmanager
def prometheus(server: ServerProcess, folder: Path) -> Iterator[str]:
    """A real Prometheus that scrapes the server every second; its address."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("there is no `prometheus` on the PATH")
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text("utf-8"))
    config["global"]["scrape_interval"] = "1s"
    (job,) = config["scrape_configs"]
    job["static_configs"] = [{"targets": [server.url.removeprefix("http://")]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), "utf-8")
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                "--web.listen-address=127.0.0.1:0",
            ],
            stderr=log,
        )
    try:
        yield f"http://127.0.0.1:{_port(folder / 'log')}"
    finally:
        process.terminate()
        process.wait(timeout=30)


def _port(log: Path) -> str:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if found := re.search(r"address=127\.0\.0\.1:([1-9]\d*)", log.read_text()):
            return found[1]
        time.sleep(0.1)
    raise AssertionError(log.read_text())


@pytest.mark.slow
def test_a_real_prometheus_answers_every_query(busy_server: ServerProcess, tmp_path: Path) -> None:
    with prometheus(busy_server, tmp_path) as address:
        unanswered = dict(QUERIES)
        deadline = time.monotonic() + 60
        while unanswered and time.monotonic() < deadline:
            work(busy_server)
            for title, query in list(unanswered.items()):
                text = urllib.parse.quote(query.replace("$__rate_interval", "30s"))
                with urllib.request.urlopen(f"{address}/api/v1/query?query={text}") as answer:
                    body = json.load(answer)
                assert body["status"] == "success", body
                values = [each["value"][1] for each in body["data"]["result"]]
                if values and "NaN" not in values:
                    del unanswered[title]
        assert not unanswered
