"""The manifests for a Ray cluster that the KubeRay operator keeps.

Kubernetes knows nothing of a RayCluster but what the operator has told it. The part of that which
ours use is written down here, from the operator's own types (1.5); the pods in it and all else are
held against the schemas of Kubernetes.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml

from tests.deploy.test_kubernetes import FOLDER, pods, read, resources
from tinsmith.server.config import ServerConfig
from tinsmith.server.config_sources import load_config

OVERLAY = "ray"

_START_PARAMS = {"type": "object", "additionalProperties": {"type": "string"}}
_TEMPLATE = {"type": "object", "required": ["spec"]}
_NUMBER = {"type": "integer", "minimum": 0}
RAY_CLUSTER = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "ray.io/v1"},
        "kind": {"const": "RayCluster"},
        "metadata": {"type": "object", "required": ["name"]},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["headGroupSpec"],
            "properties": {
                "rayVersion": {"type": "string"},
                "authOptions": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {"mode": {"enum": ["disabled", "token"]}},
                },
                "enableInTreeAutoscaling": {"type": "boolean"},
                "autoscalerOptions": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "idleTimeoutSeconds": _NUMBER,
                        "resources": {"type": "object"},
                    },
                },
                "headGroupSpec": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["rayStartParams", "template"],
                    "properties": {"rayStartParams": _START_PARAMS, "template": _TEMPLATE},
                },
                "workerGroupSpecs": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "additionalProperties": False,
                        "required": ["groupName", "minReplicas", "maxReplicas", "template"],
                        "properties": {
                            "groupName": {"type": "string"},
                            "replicas": _NUMBER,
                            "minReplicas": _NUMBER,
                            "maxReplicas": _NUMBER,
                            "rayStartParams": _START_PARAMS,
                            "template": _TEMPLATE,
                        },
                    },
                },
            },
        },
    },
}


def by_kind(kind: str) -> dict[str, Any]:
    (found,) = [each for each in resources(OVERLAY) if each["kind"] == kind]
    return found


def check(cluster: dict[str, Any]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(cluster, RAY_CLUSTER)


def check_pod(template: dict[str, Any]) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **template}
    kubernetes_validate.validate(pod, "1.33", strict=True)


def container(name: str) -> dict[str, Any]:
    found = [each for pod in pods(OVERLAY) for each in pod["spec"]["containers"]]
    return next(each for each in found if each["name"] == name)


def test_the_manifests_are_what_kubernetes_and_the_operator_take() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    check(by_kind("RayCluster"))
    templates = pods(OVERLAY)
    assert len(templates) == 2, "one of the head, one of workers"
    for template in templates:
        check_pod(template)
    for kind in ("PersistentVolumeClaim", "Service"):
        kubernetes_validate.validate(by_kind(kind), "1.33", strict=True)


def test_a_field_that_neither_knows_is_noticed() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    cluster = copy.deepcopy(by_kind("RayCluster"))
    cluster["spec"]["workerGroupSpecs"][0]["maxReplica"] = 4
    with pytest.raises(jsonschema.ValidationError, match="maxReplica"):
        check(cluster)
    template = copy.deepcopy(pods(OVERLAY)[0])
    template["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        check_pod(template)


def test_the_cluster_is_of_the_version_that_we_pin() -> None:
    lines = (FOLDER.parents[1] / "constraints.txt").read_text().splitlines()
    (pinned,) = [line.removeprefix("ray==") for line in lines if line.startswith("ray==")]
    assert by_kind("RayCluster")["spec"]["rayVersion"] == pinned


def test_the_server_is_told_of_the_cluster_in_whose_head_it_is() -> None:
    ip = "10.1.2.3"
    variables = {
        each["name"]: each["value"].replace("$(POD_IP)", ip)
        for each in container("tinsmith")["env"]
        if each["name"].startswith("TINSMITH_") and "value" in each
    }
    (generated,) = read(FOLDER / OVERLAY / "kustomization.yaml")["configMapGenerator"]
    config = load_config(FOLDER / OVERLAY / generated["files"][0], {}, variables)
    head = container("ray-head")
    (gcs,) = [port["containerPort"] for port in head["ports"] if port["name"] == "gcs-server"]
    assert (config.cluster, config.engine_host) == (f"{ip}:{gcs}", ip)
    ports = {each["name"]: each["containerPort"] for each in container("tinsmith")["ports"]}
    assert ports == {"http": ServerConfig().port, "engines": config.engine_port}
    workers = by_kind("RayCluster")["spec"]["workerGroupSpecs"]
    assert config.device == "cuda" and config.engines == workers[0]["maxReplicas"]
    gpus = container("ray-worker")["resources"]["limits"]["nvidia.com/gpu"]
    assert gpus == "1", "an engine of one rank asks for one, and each worker has room for one"


def test_the_server_sees_what_the_node_beside_it_has() -> None:
    """A driver of Ray's talks to the node on its machine through its sockets and its memory."""
    head = pods(OVERLAY)[0]["spec"]
    assert head["shareProcessNamespace"]
    mounts = [
        {(each["name"], each["mountPath"]) for each in container(name)["volumeMounts"]}
        for name in ("ray-head", "tinsmith")
    ]
    assert {("ray-logs", "/tmp/ray"), ("shared-mem", "/dev/shm")} <= mounts[0] & mounts[1]


def test_server_and_engines_have_one_data_folder() -> None:
    claim = by_kind("PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for pod in pods(OVERLAY):
        spec = pod["spec"]
        declared = {each["name"] for each in spec["volumes"]}
        mounted = {m["name"] for each in spec["containers"] for m in each["volumeMounts"]}
        assert mounted == declared
        (data,) = [each for each in spec["volumes"] if each["name"] == "data"]
        assert data["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    for name in ("tinsmith", "ray-worker"):
        assert {"name": "data", "mountPath": "/data"} in container(name)["volumeMounts"]


def test_probes_ask_ports_that_are_open() -> None:
    workers = by_kind("RayCluster")["spec"]["workerGroupSpecs"]
    for name in ("ray-head", "tinsmith", "ray-worker"):
        each = container(name)
        named = {port["name"]: str(port["containerPort"]) for port in each["ports"]}
        for kind in ("livenessProbe", "readinessProbe"):
            probe = each[kind]
            (asked,) = [probe[how]["port"] for how in ("tcpSocket", "httpGet") if how in probe]
            assert asked in named
        if name == "ray-worker":
            assert named["node-manager"] == workers[0]["rayStartParams"]["node-manager-port"]


def test_the_service_finds_the_head_by_the_operators_labels() -> None:
    service = by_kind("Service")
    name = by_kind("RayCluster")["metadata"]["name"]
    assert service["spec"]["selector"] == {"ray.io/cluster": name, "ray.io/node-type": "head"}
    (port,) = service["spec"]["ports"]
    assert port["targetPort"] in {each["name"] for each in container("tinsmith")["ports"]}


def test_the_token_is_the_one_that_the_operator_makes() -> None:
    cluster = by_kind("RayCluster")
    assert cluster["spec"]["authOptions"] == {"mode": "token"}
    variables = {each["name"]: each for each in container("tinsmith")["env"]}
    assert variables["RAY_AUTH_MODE"]["value"] == "token"
    secret = variables["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]
    assert secret == {"name": cluster["metadata"]["name"], "key": "auth_token"}


def test_kustomize_is_told_where_a_ray_cluster_has_names() -> None:
    """It knows Kubernetes' own kinds only: without, images and settings would keep their names."""
    kustomization = read(FOLDER / OVERLAY / "kustomization.yaml")
    names = yaml.safe_load((FOLDER / OVERLAY / kustomization["configurations"][0]).read_text())
    cluster = by_kind("RayCluster")
    found = [value for each in names["images"] for value in _at(cluster, each["path"].split("/"))]
    assert len(found) == 3 and {value.partition(":")[0] for value in found} == {
        kustomization["images"][0]["name"]
    }
    (reference,) = names["nameReference"]
    (path,) = [each["path"] for each in reference["fieldSpecs"]]
    (generated,) = kustomization["configMapGenerator"]
    assert _at(cluster, path.split("/")) == [generated["name"]]


def _at(found: Any, path: list[str]) -> list[Any]:
    """What is at a path; lists are walked through, as kustomize does."""
    if isinstance(found, list):
        return [value for each in found for value in _at(each, path)]
    if not path:
        return [found]
    name = path[0].removesuffix("[]")
    return _at(found[name], path[1:]) if name in found else []
