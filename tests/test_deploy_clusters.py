"""What deploy/ has for clusters of Ray and for queues fits the programs that read it, as far as
these are installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from surge_dagster.commands.cli import app
from tests.extras import require

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
# Written by hand, because KubeRay's and SkyPilot's schemas come with nothing that the tests
# install: the fields that the files use, of KubeRay's v1 and of SkyPilot's task. Ray itself reads
# what concerns autoscaling, below.
KUBERAY = {
    "RayCluster": {"rayVersion", "enableInTreeAutoscaling", "headGroupSpec", "workerGroupSpecs"},
    "RayJob": {"clusterSelector", "submissionMode", "entrypoint"},
    "head": {"rayStartParams", "template"},
    "worker": {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"},
}
SKYPILOT = {"name", "num_nodes", "resources", "workdir", "envs", "setup", "run"}


def load(path: str) -> Any:
    return yaml.safe_load((DEPLOY / path).read_text())


def merged(given: Any, over: Any) -> Any:
    """Values of Helm under those of a later file."""
    if isinstance(given, dict) and isinstance(over, dict):
        return given | {name: merged(given.get(name), value) for name, value in over.items()}
    return over


def pod_templates() -> list[dict[str, Any]]:
    spec = load("ray/cluster.yaml")["spec"]
    return [group["template"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]


def test_ray_accepts_the_cluster_of_bare_machines() -> None:
    require("ray", "ray")
    from ray.autoscaler._private.util import prepare_config, validate_config  # pyright: ignore

    given = load("ray/bare.yaml")
    config = prepare_config(given)
    validate_config(config)
    [machines] = config["available_node_types"].values()
    assert (
        machines["min_workers"] == machines["max_workers"] == len(given["provider"]["worker_ips"])
    )
    assert "RAY_enable_autoscaler_v2=0" in config["head_start_ray_commands"][-1], (
        "else there are no workers"
    )
    with pytest.raises(Exception, match="wroker_setup_commands"):
        validate_config(config | {"wroker_setup_commands": []})


def test_rays_autoscaler_reads_the_kubernetes_cluster_as_two_to_eight_gpus_and_a_head_without_work() -> (
    None
):
    require("ray", "ray")
    from ray.autoscaler._private.kuberay import autoscaling_config  # pyright: ignore

    resource = load("ray/cluster.yaml")
    resource["metadata"]["namespace"] = "default"  # as kubectl adds it
    config = autoscaling_config._derive_autoscaling_config_from_ray_cr(resource)
    head, gpu = (
        config["available_node_types"][config["head_node_type"]],
        config["available_node_types"]["gpu"],
    )
    assert head["resources"]["CPU"] == 0 and "GPU" not in head["resources"]
    assert (gpu["min_workers"], gpu["max_workers"], gpu["resources"]["GPU"]) == (1, 8, 1)


def test_kuberay_has_the_fields_of_cluster_and_job() -> None:
    cluster, job = load("ray/cluster.yaml"), load("ray/job.yaml")
    for resource in (cluster, job):
        assert resource["apiVersion"] == "ray.io/v1"
        assert resource["spec"].keys() == KUBERAY[resource["kind"]]
    assert cluster["spec"]["headGroupSpec"].keys() == KUBERAY["head"]
    for group in cluster["spec"]["workerGroupSpecs"]:
        assert group.keys() == KUBERAY["worker"]
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
    assert job["spec"]["clusterSelector"] == {"ray.io/cluster": cluster["metadata"]["name"]}


def test_kubernetes_accepts_the_pods_of_the_cluster() -> None:
    require("integrations", "dagster_k8s")
    from dagster_k8s.models import k8s_model_from_dict, k8s_snake_case_dict  # pyright: ignore
    from kubernetes.client.models import V1PodTemplateSpec  # pyright: ignore

    for template in pod_templates():
        made: Any = k8s_model_from_dict(
            V1PodTemplateSpec, k8s_snake_case_dict(V1PodTemplateSpec, template)
        )
        [container] = made.spec.containers
        assert container.readiness_probe.http_get.path == container.liveness_probe.http_get.path
        assert [mount.name for mount in container.volume_mounts] == [
            volume.name for volume in made.spec.volumes
        ]


def test_kubernetes_accepts_the_pod_of_the_encoder_service_and_the_service_its_arguments() -> None:
    require("integrations", "dagster_k8s")
    from dagster_k8s.models import k8s_model_from_dict, k8s_snake_case_dict  # pyright: ignore
    from kubernetes.client.models import V1PodSpec  # pyright: ignore

    commands: Any = get_command(app)
    serve = commands.commands["serve"]
    page = (ROOT / "docs" / "serve.md").read_text()
    pod = yaml.safe_load(page.split("```yaml")[1].split("```")[0])
    made: Any = k8s_model_from_dict(V1PodSpec, k8s_snake_case_dict(V1PodSpec, pod))
    [container] = made.containers
    assert [mount.name for mount in container.volume_mounts] == [
        volume.name for volume in made.volumes
    ]
    in_docker = re.search(r"surge-dagster \\\n +(surge-dagster serve .+)", page)
    assert in_docker is not None
    for program, name, *arguments in (container.args, in_docker[1].split()):
        assert (program, name) == ("surge-dagster", "serve")
        assert serve.make_context(name, arguments).params["host"] == "0.0.0.0"
    assert (
        container.startup_probe.http_get.port
        == 8080
        == serve.make_context("serve", ["out"]).params["port"]
    )
    assert "serve]" in (DEPLOY / "docker" / "Dockerfile").read_text(), "the image has the extra"


def test_shared_memory_of_a_pod_holds_rays_object_store() -> None:
    spec = load("ray/cluster.yaml")["spec"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        [shared] = group["template"]["spec"]["volumes"]
        assert shared["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Gi"}
        assert int(group["rayStartParams"]["object-store-memory"]) < 2**30


def test_images_have_the_version_of_ray_that_the_project_is_tested_with() -> None:
    [tested] = re.findall(r"^ray==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert load("ray/cluster.yaml")["spec"]["rayVersion"] == tested
    assert f'"ray[default]=={tested}"' in (DEPLOY / "ray" / "README.md").read_text()


def test_skypilot_has_the_fields_of_the_task() -> None:
    assert load("skypilot/embed.yaml").keys() == SKYPILOT


def test_run_that_waits_in_a_queue_of_kueue_carries_its_labels_and_is_never_too_late(
    tmp_path: Path,
) -> None:
    require("integrations", "dagster_k8s")
    from dagster import DagsterInstance
    from dagster_k8s.job import (  # pyright: ignore
        DagsterK8sJobConfig,
        UserDefinedDagsterK8sConfig,
        construct_dagster_k8s_job,
    )

    values = merged(load("kubernetes/values.yaml"), load("kubernetes/kueue.yaml"))
    by_helm = values["runLauncher"]["config"]["k8sRunLauncher"]["runK8sConfig"]
    names = {"containerConfig", "podSpecConfig", "jobSpecConfig", "jobMetadata"}
    config = UserDefinedDagsterK8sConfig.from_dict(
        {
            re.sub("[A-Z]", lambda found: f"_{found[0].lower()}", name): by_helm[name]
            for name in names
        }
    )
    launcher = DagsterK8sJobConfig(
        dagster_home="/opt/dagster", job_image="surge", instance_config_map="instance"
    )
    job: Any = construct_dagster_k8s_job(launcher, [], "run", config)
    assert job.metadata.labels.items() >= {
        ("kueue.x-k8s.io/queue-name", "surge"),
        ("kueue.x-k8s.io/priority-class", "nightly"),
    }
    [container] = job.spec.template.spec.containers
    assert container.resources.limits["nvidia.com/gpu"] == "1", "of values.yaml"

    seconds = values["dagsterDaemon"]["runMonitoring"]["startTimeoutSeconds"]
    monitoring = {"run_monitoring": {"enabled": True, "start_timeout_seconds": seconds}}
    (tmp_path / "dagster.yaml").write_text(yaml.safe_dump(monitoring))
    with DagsterInstance.from_config(str(tmp_path)) as instance:
        assert instance.run_monitoring_start_timeout_seconds == 0


def scripts() -> Iterable[tuple[str, str, str]]:
    """Name, shell and text."""
    task = load("skypilot/embed.yaml")
    return [
        ("slurm", "bash", (DEPLOY / "slurm" / "embed.sbatch").read_text()),
        ("skypilot setup", "bash", task["setup"]),
        ("skypilot run", "bash", task["run"]),
        ("kuberay", "sh", load("ray/job.yaml")["spec"]["entrypoint"]),
    ]


@pytest.mark.parametrize(
    ("shell", "text"), [script[1:] for script in scripts()], ids=[name for name, *_ in scripts()]
)
def test_shell_script_is_without_findings(shell: str, text: str) -> None:
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run(
        ["shellcheck", "--shell", shell, "-"],
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
