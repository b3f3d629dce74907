"""The files under deploy/: well formed, whole, and of one mind with the commands they start."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tilewright.cli.main import main
from tilewright.distributed.world import machines_of

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
KUBERNETES = sorted((DEPLOY / "kubernetes").glob("*.yaml"))


def obj(required: dict[str, Any], **others: Any) -> dict[str, Any]:
    """A schema of an object that has these keys, and may have others."""
    return {"type": "object", "required": list(required), "properties": {**required, **others}}


def several(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": 1}


TEXT = {"type": "string", "minLength": 1}
COUNT = {"type": "integer", "minimum": 1}
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"}
META = obj({"name": NAME})
PROBE = obj({"httpGet": obj({"path": {"enum": ["/health", "/live"]}, "port": {"enum": ["http"]}})})
CONTAINER = obj(
    {
        "name": NAME,
        "image": TEXT,
        "args": several(TEXT),
        "resources": obj({"limits": obj({"memory": TEXT}, **{"nvidia.com/gpu": COUNT})}),
    },
    ports=several(obj({"name": NAME, "containerPort": PORT})),
    volumeMounts=several(obj({"name": NAME, "mountPath": {"type": "string", "pattern": "^/"}})),
    env=several(obj({"name": TEXT})),
    startupProbe=PROBE,
    readinessProbe=PROBE,
    livenessProbe=PROBE,
)
POD = obj(
    {
        "containers": several(CONTAINER),
        "volumes": several(obj({"name": NAME})),
        "terminationGracePeriodSeconds": COUNT,
    }
)
LABELLED = obj({"metadata": obj({"labels": {"type": "object", "minProperties": 1}}), "spec": POD})
KINDS = {
    ("apps/v1", "Deployment"): obj(
        {
            "replicas": COUNT,
            "selector": obj({"matchLabels": {"type": "object", "minProperties": 1}}),
            "template": LABELLED,
        }
    ),
    ("v1", "Service"): obj(
        {
            "selector": {"type": "object", "minProperties": 1},
            "ports": several(obj({"port": PORT})),
        }
    ),
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): obj(
        {
            "replicas": COUNT,
            "leaderWorkerTemplate": obj(
                {
                    "size": COUNT,
                    "leaderTemplate": LABELLED,
                    "workerTemplate": obj({"spec": POD}),
                    "restartPolicy": {"enum": ["RecreateGroupOnPodRestart"]},
                }
            ),
        }
    ),
}


def documents(path: Path) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(path.read_text()) if each]


def pods(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The pod templates of a document."""
    spec = document["spec"]
    group = spec.get("leaderWorkerTemplate", {})
    found = (spec.get("template"), group.get("leaderTemplate"), group.get("workerTemplate"))
    return [each for each in found if each]


@pytest.mark.parametrize("path", KUBERNETES, ids=lambda path: path.stem)
def test_what_kubernetes_reads_has_all_it_needs(path: Path) -> None:
    found = documents(path)
    for document in found:
        jsonschema.validate(document, obj({"metadata": META, "spec": {"type": "object"}}))
        jsonschema.validate(document["spec"], KINDS[document["apiVersion"], document["kind"]])
    served, services = found[0], [each for each in found if each["kind"] == "Service"]
    labels = pods(served)[0]["metadata"]["labels"]
    for service in services:
        own = {k: v for k, v in service["spec"]["selector"].items() if "sigs.k8s.io" not in k}
        assert own.items() <= labels.items()
    for pod in pods(served):
        container = pod["spec"]["containers"][0]
        mounted = {each["name"] for each in container["volumeMounts"]}
        assert mounted == {each["name"] for each in pod["spec"]["volumes"]}


def flags_of(help_text: str) -> set[str]:
    return set(re.findall(r"--[a-z][a-z-]+", help_text))


def words(path: Path) -> list[list[str]]:
    """The command lines of a file, without the program."""
    if path.name == "compose.yaml":
        return [each["command"] for each in documents(path)[0]["services"].values()]
    every = [pod["spec"]["containers"][0]["args"] for each in documents(path) for pod in pods(each)]
    assert every
    return every


@pytest.mark.parametrize("path", [*KUBERNETES, DEPLOY / "compose.yaml"], ids=lambda path: path.stem)
def test_options_are_those_of_the_command(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    known = flags_of(capsys.readouterr().out)
    for line in words(path):
        used = {word.partition("=")[0] for word in line if word.startswith("--")}
        assert used <= known, used - known


def test_a_group_takes_its_place_from_the_variables_of_its_controller() -> None:
    """Those that options are filled from are those that the command knows itself."""
    (document, _) = documents(DEPLOY / "kubernetes" / "leaderworkerset.yaml")
    leader, worker = (pod["spec"]["containers"][0] for pod in pods(document))
    assert leader["args"] == worker["args"] and leader["env"] == worker["env"]
    named = dict(each[2:].split("=") for each in leader["args"] if each.startswith("--"))
    variables = {"LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "leader"}
    filled = {
        key: re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], value)
        for key, value in named.items()
    }
    machines = machines_of(None, variables)
    assert (filled["nnodes"], filled["node-rank"]) == (str(machines.count), str(machines.rank))
    assert (filled["master-addr"], filled["master-port"]) == (machines.host, str(machines.port))
    ports = {each["name"]: each["containerPort"] for each in leader["ports"]}
    assert str(ports["ranks"]) == filled["master-port"]
    group = document["spec"]["leaderWorkerTemplate"]
    assert filled["target"] == "cpu", "the text says CPUs"
    assert int(filled["tensor-parallel-size"]) == group["size"], "a rank on each"
    assert [each["name"] for each in leader["env"]] == ["TILEWRIGHT_TOKEN"]


def test_a_pods_gpus_and_time_are_those_of_its_command() -> None:
    (document, _) = documents(DEPLOY / "kubernetes" / "deployment.yaml")
    (pod,) = pods(document)
    (container,) = pod["spec"]["containers"]
    named = dict(each[2:].split("=") for each in container["args"] if each.startswith("--"))
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(named["replicas"])
    assert pod["spec"]["terminationGracePeriodSeconds"] > int(named["drain-timeout"])


def test_the_image_serves_as_an_unprivileged_user() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line and line[0] not in "# "]
    assert {step for step, _ in steps} <= {
        *("FROM", "ARG", "RUN", "WORKDIR", "COPY", "USER", "ENV", "VOLUME", "EXPOSE"),
        *("HEALTHCHECK", "STOPSIGNAL", "ENTRYPOINT", "CMD"),
    }
    last = dict(steps)
    assert last["USER"] == "10001" and last["EXPOSE"] == "8000" and last["CMD"] == '["/model"]'
    assert last["ENTRYPOINT"].startswith('["tilewright", "serve"') and "/health" in text


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl")
def test_kubectl_reads_them(tmp_path: Path) -> None:
    """Without a cluster it can build, and not apply."""
    for path in KUBERNETES:
        shutil.copy(path, tmp_path)
    names = "".join(f"- {path.name}\n" for path in KUBERNETES)
    (tmp_path / "kustomization.yaml").write_text(f"resources:\n{names}")
    built = subprocess.run(
        ["kubectl", "kustomize", str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert built.returncode == 0, built.stderr
    kinds = [each["kind"] for each in yaml.safe_load_all(built.stdout)]
    assert sorted(kinds) == ["Deployment", "LeaderWorkerSet", "Service", "Service"]
    has_cluster = subprocess.run(["kubectl", "version"], capture_output=True, timeout=60)
    if has_cluster.returncode:
        pytest.skip("kubectl has no cluster to try them on")
    for path in KUBERNETES:
        command = ["kubectl", "apply", "--dry-run=client", "-f", str(path)]
        tried = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert tried.returncode == 0, tried.stderr


def test_compose_reads_its_file() -> None:
    services = documents(DEPLOY / "compose.yaml")[0]["services"]
    assert set(services) == {"cpu", "gpu"} and services["gpu"]["profiles"] == ["gpu"]
    asked = services["gpu"]["deploy"]["resources"]["reservations"]["devices"][0]["count"]
    assert services["gpu"]["command"][services["gpu"]["command"].index("--replicas") + 1] == str(
        asked
    )
    if shutil.which("docker") is None:
        pytest.skip("there is no docker")
    version = subprocess.run(["docker", "compose", "version"], capture_output=True, timeout=60)
    if version.returncode:
        pytest.skip("docker has no compose")
    command = ["docker", "compose", "--file", str(DEPLOY / "compose.yaml"), "config", "--quiet"]
    tried = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={"MODEL": "/m", "PATH": "/bin"}
    )
    assert tried.returncode == 0, tried.stderr
