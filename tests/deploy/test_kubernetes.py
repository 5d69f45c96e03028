"""deploy/kubernetes: manifests that Kubernetes takes, and that mean what the runbook says."""

from __future__ import annotations

import copy
import json
import subprocess
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from collected import commands
from deploy_files import DEPLOY, attn_on_path, tool
from jsonschema import Draft202012Validator
from pages import table
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012
from shared import REPO
from stopping import Act, kill_all, started, terminate

ROOT = DEPLOY / "kubernetes"
OVERLAYS = ("base", "multi-node")
# podFailurePolicy is stable since 1.31, podReplacementPolicy since 1.34.
VERSIONS = ("1.34", "1.37")
# Not resources: Kustomize's own files.
KUSTOMIZE = {"kustomization.yaml", "images.yaml"}


def documents(text: str) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(text) if one]


def written(overlay: str) -> list[dict[str, Any]]:
    """The resources as they are in the files."""
    paths = (p for p in (ROOT / overlay).glob("*.yaml") if p.name not in KUSTOMIZE)
    return [one for path in paths for one in documents(path.read_text())]


@cache
def built(overlay: str) -> list[dict[str, Any]]:
    """The resources as Kustomize applies them."""
    done = subprocess.run(
        [tool("kubectl", "kubernetes-client"), "kustomize", str(ROOT / overlay)],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return documents(done.stdout)


@cache
def dask_cluster(version: str) -> Draft202012Validator:
    folder = files("kubernetes_validate") / "kubernetes-json-schema"
    text = (folder / f"v{version}.0-local-strict/_definitions.json").read_text()
    # Its references name the file that they are in.
    definitions = json.loads(text.replace('"_definitions.json#', '"#'))
    registry: Registry[Any] = Registry().with_resource(
        "kubernetes", Resource(definitions, DRAFT202012)
    )
    schema = json.loads((Path(__file__).parent / "dask_operator.json").read_text())
    return Draft202012Validator(schema, registry=registry)


def check(resource: dict[str, Any], version: str) -> None:
    if resource["apiVersion"].startswith("kubernetes.dask.org/"):
        dask_cluster(version).validate(resource)
    else:
        kubernetes_validate.validate(resource, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubernetes_and_the_operator_accept_what_is_written(overlay, version):
    resources = written(overlay)
    assert resources
    for resource in resources:
        check(resource, version)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubernetes_and_the_operator_accept_what_kustomize_makes_of_it(overlay):
    for resource in built(overlay):
        check(resource, VERSIONS[-1])


def test_a_field_that_does_not_exist_would_be_found():
    for resource in written("base") + written("multi-node"):
        wrong = copy.deepcopy(resource)
        wrong["spce" if resource["kind"] != "CronJob" else "spec"] = {"schedul": 1}
        with pytest.raises(Exception, match=r"spce|schedul"):
            check(wrong, VERSIONS[-1])
    (dask,) = (r for r in written("multi-node") if r["kind"] == "DaskCluster")
    wrong = copy.deepcopy(dask)
    wrong["spec"]["worker"]["spec"]["containers"][0]["resource"] = {}
    assert not dask_cluster(VERSIONS[-1]).is_valid(wrong)


def one(resources: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (found,) = (r for r in resources if (r["kind"], r["metadata"]["name"]) == (kind, name))
    return found


def pod_specs(resources: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for resource in resources:
        spec = resource.get("spec", {})
        if resource["kind"] == "CronJob":
            yield spec["jobTemplate"]["spec"]["template"]["spec"]
        elif resource["kind"] == "Deployment":
            yield spec["template"]["spec"]
        elif resource["kind"] == "DaskCluster":
            yield from (spec["worker"]["spec"], spec["scheduler"]["spec"])


def test_only_a_preempted_night_is_tried_again():
    job = one(written("base"), "CronJob", "attn-nightly")["spec"]["jobTemplate"]["spec"]
    ignore, fail = job["podFailurePolicy"]["rules"]
    # The first rule that matches counts: a disruption before the 143 that it ends with.
    assert ignore == {
        "action": "Ignore",
        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
    }
    policy = fail["onExitCodes"]
    assert (fail["action"], policy["operator"]) == ("FailJob", "NotIn")
    container = job["template"]["spec"]["containers"][0]
    assert policy["containerName"] == container["name"]
    again = {int(row[0]) for row in table(DEPLOY / "README.md", "Exit codes")
             if row[2].startswith("tried again")}  # fmt: skip
    assert set(policy["values"]) == again == {5, 143}
    # Kubernetes' condition for a policy of failures.
    assert job["template"]["spec"]["restartPolicy"] == "Never"


def action_on(job: dict[str, Any], code: int, *, disrupted: bool) -> str:
    """What the Job's podFailurePolicy makes of a pod that ended with a code: the action of the
    first rule that matches; without one, the failure counts for backoffLimit."""
    for rule in job["podFailurePolicy"]["rules"]:
        if policy := rule.get("onExitCodes"):
            inside = code in policy["values"]
            if code and inside == (policy["operator"] == "In"):
                return str(rule["action"])
        elif disrupted:
            return str(rule["action"])
    return "Count"


@pytest.mark.slow
def test_a_night_that_kubernetes_stops_and_tries_again_ends_in_the_same_artifacts(
    whole_night, tmp_path
):
    job = one(written("base"), "CronJob", "attn-nightly")["spec"]["jobTemplate"]["spec"]
    pod = job["template"]["spec"]["containers"][0]
    command = [word.replace("/opt/attn", str(REPO)) for word in pod["command"]]
    environment = {**attn_on_path(tmp_path / "bin"), **whole_night.settings(tmp_path)}

    def try_of(number: int, until: str | None = None, act: Act | None = None) -> int:
        # A pod has its own /tmp, and keeps the volume alone.
        temporary = tmp_path / f"tmp-{number}"
        temporary.mkdir()
        own = {**environment, "TMPDIR": str(temporary)}
        return started(command, own, temporary, tmp_path / "log", until, act)

    # A pod is stopped by TERM to its first process: by hand it counts, a preemption does not.
    code = try_of(1, "pca", terminate)
    assert action_on(job, code, disrupted=False) == "Count" and job["backoffLimit"] > 0
    assert action_on(job, code, disrupted=True) == "Ignore"
    # The node is lost, or terminationGracePeriodSeconds are over: 137.
    assert try_of(2, "umap", kill_all) == -9
    assert action_on(job, 137, disrupted=True) == "Ignore"
    assert action_on(job, 137, disrupted=False) == "FailJob"
    assert try_of(3) == 0
    whole_night.assert_same(tmp_path, tmp_path / "log", resumed=2)


def test_one_night_at_a_time_on_one_gpu_with_the_stores_node():
    resources = written("base")
    cron = one(resources, "CronJob", "attn-nightly")["spec"]
    assert (cron["concurrencyPolicy"], cron["timeZone"]) == ("Forbid", "Etc/UTC")
    job = cron["jobTemplate"]["spec"]
    assert job["activeDeadlineSeconds"] < 24 * 3600 - cron["startingDeadlineSeconds"]
    assert job["podReplacementPolicy"] == "Failed"
    pod = job["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    (term,) = pod["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    sidecar = one(resources, "Deployment", "attn-sidecar")["spec"]["template"]
    assert term["labelSelector"]["matchLabels"].items() <= sidecar["metadata"]["labels"].items()
    assert one(resources, "PersistentVolumeClaim", "attn-data")["spec"]["accessModes"] == [
        "ReadWriteOnce"
    ]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_a_pod_names_exists_and_no_container_may_more_than_it_needs(overlay):
    resources = written("base") + (written(overlay) if overlay != "base" else [])
    claims = {r["metadata"]["name"] for r in resources if r["kind"] == "PersistentVolumeClaim"}
    for pod in pod_specs(resources):
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for volume in volumes.values():
            if claim := volume.get("persistentVolumeClaim"):
                assert claim["claimName"] in claims
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is False
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= set(volumes)
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert container["resources"]["limits"]["memory"]


def test_the_sidecar_is_started_with_options_that_it_has():
    pod = next(pod_specs([one(written("base"), "Deployment", "attn-sidecar")]))
    command, *words = pod["containers"][0]["args"]
    commands()[f"attn {command}"].make_context(command, words)
    ports = {port["name"]: port["containerPort"] for port in pod["containers"][0]["ports"]}
    service = one(written("base"), "Service", "attn-sidecar")["spec"]["ports"]
    assert {port["targetPort"]: port["port"] for port in service} == ports


def test_several_nodes_differ_by_their_scheduler_and_its_certificates():
    resources = built("multi-node")
    cron = next(r for r in resources if r["kind"] == "CronJob")
    pod = next(pod_specs([cron]))
    container = pod["containers"][0]
    environment = one(resources, "ConfigMap", container["envFrom"][0]["configMapRef"]["name"])
    words = environment["data"]["ATTN_OPTIONS"].split()
    context = commands()["attn discover"].make_context("discover", ["--db", "x", *words])
    address = context.params["scheduler"]
    dask = next(r for r in resources if r["kind"] == "DaskCluster")
    ports = {port["port"] for port in dask["spec"]["scheduler"]["service"]["ports"]}
    # The operator names the service.
    assert address == f"tls://{dask['metadata']['name']}-scheduler:8786" and 8786 in ports
    worker = dask["spec"]["worker"]["spec"]["containers"][0]
    assert address in worker["args"]
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    files_named = [v for k, v in environment["data"].items() if k.startswith("DASK_")]
    assert len(files_named) == 3 and {str(Path(f).parent) for f in files_named} == {"/tls"}
    assert "/tls" in mounted
    images = {c["image"] for p in pod_specs(resources) for c in p["containers"]}
    assert images == {"registry.example/attn:0.1.0"}
