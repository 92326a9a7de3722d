"""The Kubernetes manifests, against the schemas of Kubernetes itself."""

from __future__ import annotations

import copy
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tinsmith.errors import ValidationError
from tinsmith.server.config_sources import load_config

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text("utf-8"))


def resources(overlay: str) -> list[dict[str, Any]]:
    """What `kubectl kustomize` makes of an overlay, as far as ours go: resources and patches."""
    kustomization = read(FOLDER / overlay / "kustomization.yaml")
    made: list[dict[str, Any]] = []
    for name in kustomization["resources"]:
        path = (FOLDER / overlay / name).resolve()
        made += resources(path.name) if path.is_dir() else [read(path)]
    made = copy.deepcopy(made)
    for entry in kustomization.get("patches", ()):
        target = entry["target"]
        (found,) = [
            each
            for each in made
            if (each["kind"], each["metadata"]["name"]) == (target["kind"], target["name"])
        ]
        for patch in yaml.safe_load(entry["patch"]):
            _add(found, patch)
    return made


def _add(found: Any, patch: dict[str, Any]) -> None:
    assert patch["op"] == "add"
    *parents, last = [
        part.replace("~1", "/").replace("~0", "~") for part in patch["path"].split("/")[1:]
    ]
    for part in parents:
        found = found[int(part)] if isinstance(found, list) else found[part]
    assert last not in found
    found[last] = patch["value"]


def pods(overlay: str) -> list[dict[str, Any]]:
    """The pod templates of what an overlay makes; those of a RayCluster, too."""
    found = []
    for each in resources(overlay):
        spec = each["spec"]
        groups = [spec.get("headGroupSpec"), *spec.get("workerGroupSpecs", ()), spec]
        found += [group["template"] for group in groups if group and "template" in group]
    return found


@pytest.mark.parametrize("overlay", ["base", "cuda"])
def test_the_manifests_are_what_kubernetes_takes(overlay: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    made = resources(overlay)
    assert {each["kind"] for each in made} == {"StatefulSet", "Service"}
    for each in made:
        kubernetes_validate.validate(each, "1.33", strict=True)


def test_a_field_that_kubernetes_does_not_know_is_noticed() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    workload = next(each for each in resources("base") if each["kind"] == "StatefulSet")
    workload["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(workload, "1.33", strict=True)


def test_the_service_finds_the_pods_and_the_pods_their_settings(tmp_path: Path) -> None:
    service, workload = sorted(resources("base"), key=lambda each: str(each["kind"]))
    pod = workload["spec"]["template"]
    assert service["spec"]["selector"] == workload["spec"]["selector"]["matchLabels"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    (container,) = pod["spec"]["containers"]
    assert service["spec"]["ports"][0]["targetPort"] == container["ports"][0]["name"]
    mounted = {each["name"] for each in container["volumeMounts"]}
    claimed = {each["metadata"]["name"] for each in workload["spec"]["volumeClaimTemplates"]}
    assert mounted == claimed | {each["name"] for each in pod["spec"]["volumes"]}
    (generated,) = read(FOLDER / "base" / "kustomization.yaml")["configMapGenerator"]
    assert {"name": "settings", "configMap": {"name": generated["name"]}} in pod["spec"]["volumes"]
    settings = FOLDER / "base" / generated["files"][0]
    config = load_config(settings, {})
    assert config.public_url == tomllib.loads(settings.read_text("utf-8"))["public_url"]


@pytest.mark.parametrize("overlay", ["base", "cuda", "ray"])
def test_variables_that_kubernetes_makes_of_a_services_name_are_no_settings(overlay: str) -> None:
    with pytest.raises(ValidationError, match="port"):
        load_config(None, {}, {"TINSMITH_PORT": "tcp://10.0.0.1:8000"})
    assert pods(overlay)
    assert not any(pod["spec"].get("enableServiceLinks", True) for pod in pods(overlay))


def test_the_gpu_is_asked_for_where_there_is_one() -> None:
    limits = [
        each["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
        for overlay in ("base", "cuda")
        for each in resources(overlay)
        if each["kind"] == "StatefulSet"
    ]
    assert ["nvidia.com/gpu" in each for each in limits] == [False, True]
