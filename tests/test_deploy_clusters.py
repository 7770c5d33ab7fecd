"""What deploy/ has for clusters of Ray and for queues fits the programs that read it, as far as
these are installed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from surge_dagster.commands.cli import command_of
from tests.extras import require
from tests.pages import DEPLOY, code_blocks, deployed

ROOT = Path(__file__).parent.parent


def pod_templates() -> list[dict[str, Any]]:
    spec = deployed("ray/cluster.yaml")["spec"]
    return [group["template"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]


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


def test_kubernetes_accepts_the_pod_of_the_encoder_service() -> None:
    require("integrations", "dagster_k8s")
    from dagster_k8s.models import k8s_model_from_dict, k8s_snake_case_dict  # pyright: ignore
    from kubernetes.client.models import V1PodSpec  # pyright: ignore

    page = (ROOT / "docs" / "serve.md").read_text()
    pod = yaml.safe_load(code_blocks(page, "yaml")[0])
    made: Any = k8s_model_from_dict(V1PodSpec, k8s_snake_case_dict(V1PodSpec, pod))
    [container] = made.containers

    program, name, *arguments = container.args
    given = command_of(name).make_context(name, arguments).params

    assert program == "surge-dagster"
    assert given["host"] == "0.0.0.0"
    assert given["port"] == container.startup_probe.http_get.port


def test_shared_memory_of_a_pod_holds_rays_object_store() -> None:
    spec = deployed("ray/cluster.yaml")["spec"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        [shared] = group["template"]["spec"]["volumes"]
        assert shared["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Gi"}
        assert int(group["rayStartParams"]["object-store-memory"]) < 2**30


def test_images_have_the_version_of_ray_that_the_project_is_tested_with() -> None:
    [tested] = re.findall(r"^ray==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)

    assert deployed("ray/cluster.yaml")["spec"]["rayVersion"] == tested
    assert f'"ray[default]=={tested}"' in (DEPLOY / "ray" / "README.md").read_text()
