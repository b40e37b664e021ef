"""The rendered chart is valid for Kubernetes, safe by default, and consistent with the code.

Nothing here runs on a cluster: helm renders the objects, and the tests check them.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import subprocess
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import kubernetes_validate.utils
import pytest
import yaml

from penstock import process
from penstock.core.hosts import HostPolicy
from penstock.gateway.settings import GatewaySettings
from penstock.kafka.topology.services import SERVICES
from penstock.kafka.topology.topics import ready, workers_group
from penstock.settings import ENVIRONMENT_PREFIX, Reporting, Settings
from penstock.task_sync.settings import TaskSyncSettings
from penstock.worker.settings import WorkerSettings
from tests.helm.rendered import (
    CHART,
    KUBERNETES,
    Object,
    Render,
    component_of,
    container_of,
    environment_of,
    named,
    of_kind,
    pod_of,
    ports_of,
    scalars,
    selects,
    workload,
    workloads,
)
from tests.support.service_apps import settings_of

ROOT = Path(__file__).parents[2]
SETS = sorted(path.stem for path in (Path(__file__).parent / "values").glob("*.yaml"))
# The oldest Kubernetes that Chart.yaml accepts, and the newest of the validator.
VERSIONS = ("1.29", kubernetes_validate.latest_version())
CUSTOM = {
    "ScaledObject": "keda.sh/v1alpha1",
    "TriggerAuthentication": "keda.sh/v1alpha1",
    "PodMonitor": "monitoring.coreos.com/v1",
    "PrometheusRule": "monitoring.coreos.com/v1",
    "HTTPRoute": "gateway.networking.k8s.io/v1",
}
KINDS: dict[str, type[Settings]] = {
    **{name: settings_of(name) for name in SERVICES},
    "worker": WorkerSettings,
}
# Variables of `penstock.process` and `penstock.logs`, which are not fields of settings.
PROCESS = {"PENSTOCK_LOG_LEVEL", "PENSTOCK_LOG_FORMAT", "PENSTOCK_READY_FILE"}
# Variables whose values must not be in an object as plain text.
SECRET = {
    "PENSTOCK_POSTGRES",
    "PENSTOCK_POSTGRES_SESSION",
    "PENSTOCK_CALLBACK_SECRETS",
    "PENSTOCK_ENCRYPTION_KEYS",
    "PENSTOCK_REPORT_KEYS",
    "PENSTOCK_API_KEY",
    "PENSTOCK_KAFKA_PASSWORD",
}

every_set = pytest.mark.parametrize("name", SETS)


@pytest.fixture(scope="module", autouse=True)
def _schemas_read_once() -> Any:
    """Caches the schemas, since the validator reads megabytes of them for every object."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            kubernetes_validate.utils, "schema_contents", cache(kubernetes_validate.utils.schema_contents)
        )
        yield


@every_set
def test_helm_lint_passes(helm: str, render: Render, name: str) -> None:
    """O13: helm lint --strict reports no problem."""
    values = Path(__file__).parent / "values" / f"{name}.yaml"
    ran = subprocess.run(
        [helm, "lint", "--strict", str(CHART), "--values", str(values), *KUBERNETES],
        env=render.environment,
        check=False,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


@every_set
@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid_for_kubernetes(render: Render, name: str, version: str) -> None:
    """O13: every object is valid for the oldest and the newest Kubernetes, without unknown
    fields."""
    for found in render.objects(name):
        assert found["metadata"]["namespace"] == "tasks"
        if found["kind"] in CUSTOM:
            assert found["apiVersion"] == CUSTOM[found["kind"]]
        else:
            kubernetes_validate.validate(found, version, strict=True)


@every_set
def test_names_are_unique(render: Render, name: str) -> None:
    """O13: objects of one kind have different names, which fit into a label."""
    names = [(found["kind"], found["metadata"]["name"]) for found in render.objects(name)]
    assert len(set(names)) == len(names)
    assert all(len(each) <= 63 for _, each in names)


@every_set
def test_every_container_is_confined(render: Render, name: str) -> None:
    """O13: no container runs as root, writes to its root, gains privileges, or has a token
    of the cluster."""
    found = workloads(render.objects(name))
    assert {component_of(each) for each in found} >= {*SERVICES, "migrate", "topics"}
    for each in found:
        pod = pod_of(each)["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == 10001
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & set(pod)
        assert container_of(each)["securityContext"] == {
            "runAsNonRoot": True,
            "runAsUser": 10001,
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container_of(each)["resources"]["requests"]
        assert container_of(each)["resources"]["limits"]["memory"]
        (tmp,) = (volume for volume in pod["volumes"] if volume["name"] == "tmp")
        assert tmp["emptyDir"]["sizeLimit"]
        assert {"name": "tmp", "mountPath": "/tmp"} in container_of(each)["volumeMounts"]


@every_set
def test_pods_use_the_service_account(render: Render, name: str) -> None:
    """O13: pods use the service account of the release. Hooks do not, since they run before
    it exists."""
    objects = render.objects(name)
    (account,) = of_kind(objects, "ServiceAccount")
    assert account["automountServiceAccountToken"] is False
    for each in workloads(objects):
        wanted = account["metadata"]["name"] if each["kind"] == "Deployment" else None
        assert pod_of(each)["spec"].get("serviceAccountName") == wanted


@every_set
def test_every_selector_matches_only_its_pods(render: Render, name: str) -> None:
    """O13: selectors of Deployments, budgets, services, policies, monitors and constraints
    match only their pods."""
    objects = render.objects(name)
    pods = {component_of(each): pod_of(each)["metadata"]["labels"] for each in workloads(objects)}

    def selected(selector: Object) -> set[str]:
        return {component for component, labels in pods.items() if selects(selector, labels)}

    for each in of_kind(objects, "Deployment"):
        component = component_of(each)
        assert selected(each["spec"]["selector"]) == {component}
        constraints = pod_of(each)["spec"]["topologySpreadConstraints"]
        assert {found["topologyKey"] for found in constraints} == {
            "kubernetes.io/hostname",
            "topology.kubernetes.io/zone",
        }
        assert all(selected(found["labelSelector"]) == {component} for found in constraints)
    budgets = of_kind(objects, "PodDisruptionBudget")
    assert [selected(each["spec"]["selector"]) for each in budgets] == [
        {component_of(each)} for each in budgets
    ]
    assert {component_of(each) for each in budgets} == set(pods) - {"migrate", "topics"}
    for each in of_kind(objects, "Service"):
        assert selected({"matchLabels": each["spec"]["selector"]}) == {"gateway"}
        named_ports = ports_of(workload(objects, "gateway"))
        assert all(port["targetPort"] in named_ports for port in each["spec"]["ports"])
    for each in of_kind(objects, "NetworkPolicy"):
        component = component_of(each)
        assert selected(each["spec"]["podSelector"]) == ({component} if component else set(pods))
    for each in of_kind(objects, "PodMonitor"):
        assert selected(each["spec"]["selector"]) == set(SERVICES)
        assert all("metrics" in ports_of(workload(objects, component)) for component in SERVICES)


@every_set
def test_every_variable_is_a_setting(render: Render, name: str) -> None:
    """O13: each component reads every PENSTOCK_ variable that the chart sets for it."""
    for each in workloads(render.objects(name)):
        component = component_of(each)
        names = [entry["name"] for entry in container_of(each)["env"]]
        assert len(set(names)) == len(names)
        kinds = (
            [KINDS[component.partition("-")[0] if component.startswith("worker-") else component]]
            if (each["kind"] == "Deployment")
            else list(KINDS.values())
        )
        known = {
            ENVIRONMENT_PREFIX + field.name.upper() for kind in kinds for field in dataclasses.fields(kind)
        }
        assert {found for found in names if found.startswith(ENVIRONMENT_PREFIX)} <= known | PROCESS


@every_set
def test_only_services_have_the_keys_of_report_tokens(render: Render, name: str) -> None:
    """O5: with `reportKeys`, the services that make or check tokens have the keys, from a Secret.
    Workers have none, nor has any service without the setting."""
    having = {
        component_of(each)
        for each in workloads(render.objects(name))
        if "PENSTOCK_REPORT_KEYS" in environment_of(each)
    }
    checks = {service for service in SERVICES if issubclass(settings_of(service), Reporting)}
    assert having == (checks if name == "everything" else set())


@every_set
def test_services_accept_their_environment(render: Render, name: str, tmp_path: Path) -> None:
    """O13: each service and worker accepts the environment that the chart sets."""
    stand_in = {
        "PENSTOCK_POSTGRES": "postgresql://penstock@db/penstock",
        "PENSTOCK_POSTGRES_SESSION": "postgresql://penstock@db/penstock",
        "PENSTOCK_ENCRYPTION_KEYS": "a" * 43 + "=",
        "PENSTOCK_REPORT_KEYS": "a" * 43 + "=",
        "PENSTOCK_CALLBACK_SECRETS": "whsec_bm90LWEtc2VjcmV0LWNoYW5nZS1tZS1wbGVhc2UtMTIz",
    }
    # Mounted files do not exist here.
    file = tmp_path / "file"
    file.write_text("given")
    for each in of_kind(render.objects(name), "Deployment"):
        component = component_of(each)
        environment = {
            key: value if isinstance(value, str) else stand_in.get(key, "given")
            for key, value in environment_of(each).items()
        }
        environment |= {key: str(file) for key in environment if key.endswith("_FILE")}
        settings = KINDS["worker" if component.startswith("worker-") else component].load(environment)
        if isinstance(settings, WorkerSettings) and settings.worker_gateway:
            assert "PENSTOCK_KAFKA" not in environment
            continue
        assert settings.kafka == environment["PENSTOCK_KAFKA"]
        assert settings.prefix == environment["PENSTOCK_PREFIX"]


@every_set
def test_no_object_has_a_secret(render: Render, name: str) -> None:
    """O13: secrets come from existing Secrets, as references or files; no object has one as
    text."""
    objects = render.objects(name)
    assert not of_kind(objects, "Secret")
    for each in workloads(objects):
        environment = environment_of(each)
        for variable in SECRET & set(environment):
            assert "secretKeyRef" in environment[variable]
    assert not [
        found for each in objects for found in scalars(each) if "whsec_" in found or "://user:" in found
    ]


@every_set
def test_every_file_is_mounted(render: Render, name: str) -> None:
    """O13: the file that a variable names is on a mounted volume, from the configured
    secret."""
    for each in workloads(render.objects(name)):
        volumes = {volume["name"]: volume for volume in pod_of(each)["spec"]["volumes"]}
        held = {"/etc/penstock/topics/topics.toml"} if "topics" in volumes else set()
        for mount in container_of(each)["volumeMounts"]:
            for source in volumes[mount["name"]].get("projected", {}).get("sources", []):
                assert mount["readOnly"] is True
                held |= {f"{mount['mountPath']}/{item['path']}" for item in source["secret"]["items"]}
        environment = environment_of(each)
        files = {
            value
            for variable, value in environment.items()
            if (variable.endswith("_FILE") and variable != "PENSTOCK_READY_FILE")
            or variable == "PGSSLROOTCERT"
        }
        assert files == held


@every_set
def test_grace_periods_exceed_forced_exits(render: Render, name: str) -> None:
    """O13: a pod is killed only after the forced exit of its process."""
    grace_s = inspect.signature(process.run).parameters["grace_s"].default
    for each in of_kind(render.objects(name), "Deployment"):
        given_s = pod_of(each)["spec"]["terminationGracePeriodSeconds"]
        container = container_of(each)
        if component_of(each).startswith("worker-"):
            # worker/app.py: the drain and 15 s.
            needed_s = float(environment_of(each)["PENSTOCK_DRAIN_TIMEOUT_S"]) + 15
        else:
            needed_s = grace_s + float(container["lifecycle"]["preStop"]["exec"]["command"][1])
        assert given_s >= needed_s + process.EXIT_TIMEOUT_S


@every_set
def test_services_are_probed(render: Render, name: str) -> None:
    """O13: probes of liveness and readiness use a port that the settings of the service
    open."""
    objects = render.objects(name)
    for component in SERVICES:
        found = workload(objects, component)
        port = "http" if component == "gateway" else "metrics"
        container = container_of(found)
        for probe, path in (
            ("livenessProbe", "/livez"),
            # A gateway without Kafka still accepts tasks: its readiness must not need Kafka.
            ("readinessProbe", "/livez" if component == "gateway" else "/readyz"),
            ("startupProbe", "/livez"),
        ):
            assert container[probe]["httpGet"] == {"path": path, "port": port}
        environment = environment_of(found)
        assert environment["PENSTOCK_METRICS_PORT"] == str(ports_of(found)["metrics"])
        assert environment["PENSTOCK_METRICS_HOST"] in ("0.0.0.0", "::")
        assert container["args"] == ["run", component]
        if component == "gateway":
            assert environment["PENSTOCK_GATEWAY_PORT"] == str(ports_of(found)["http"])
            assert environment["PENSTOCK_GATEWAY_HOST"] in ("0.0.0.0", "::")
            assert set(environment["PENSTOCK_GATEWAY_AUTH"].split(",")) <= {"keys", "oidc"}


def test_the_gateway_knows_the_names_by_which_it_is_called(render: Render) -> None:
    """O5: the gateway answers to the names of its Service, Ingress and HTTPRoute and to those in
    the values. Probes and scrapes name the address of a pod, which needs no entry."""

    def policy(*arguments: str) -> HostPolicy:
        environment = environment_of(workload(render.objects(*arguments), "gateway"))
        hosts = tuple(environment["PENSTOCK_ALLOWED_HOSTS"].split(","))
        GatewaySettings.load({}, allowed_hosts=hosts)
        return HostPolicy.of(environment["PENSTOCK_GATEWAY_HOST"], hosts)

    minimal = policy("minimal")
    service = "prod-penstock-gateway"
    for host in (service, f"{service}.tasks", f"{service}.tasks.svc:8420", "10.2.3.4:8420", "localhost:8420"):
        assert minimal.allows(host), host
    for host in ("tasks.example.com", f"{service}.evil.example", "svc"):
        assert not minimal.allows(host), host
    everything = policy("everything")
    for host in ("tasks.example.com", "shop.tasks.example.com", "lb.example.net"):
        assert everything.allows(host), host


def test_every_service_has_two_replicas(render: Render) -> None:
    """O13: each service has two replicas by default, and a new pod is ready before an old
    one ends."""
    for each in of_kind(render.objects("minimal"), "Deployment"):
        assert each["spec"]["replicas"] == 2
        assert each["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}


def test_hooks_run_first_and_in_order(render: Render) -> None:
    """O13: before an install or upgrade, hooks create policies, then migrate, then create
    topics. A failure stops the install or upgrade."""
    objects = render.objects("everything")
    hooks = {
        (found["kind"], found["metadata"]["name"]): found["metadata"]["annotations"]
        for found in objects
        if "helm.sh/hook" in found["metadata"].get("annotations", {})
    }
    assert {each["helm.sh/hook"] for each in hooks.values()} == {"pre-install,pre-upgrade"}
    weights = {key: int(each["helm.sh/hook-weight"]) for key, each in hooks.items()}
    migrate, topics = ("Job", "prod-tasks-migrate"), ("Job", "prod-tasks-topics")
    assert weights[migrate] < weights[topics]
    assert {key for key, weight in weights.items() if weight < weights[migrate]} == {
        ("NetworkPolicy", "prod-tasks-migrate"),
        ("NetworkPolicy", "prod-tasks-topics"),
        ("ConfigMap", "prod-tasks-topics-hook"),
    }
    assert container_of(workload(objects, "migrate"))["args"] == ["migrate", "--step", "pre"]
    assert container_of(workload(objects, "topics"))["args"] == ["topics"]
    # A hook runs before the objects of the release exist: it may use only secrets and hooks.
    volumes = pod_of(workload(objects, "topics"))["spec"]["volumes"]
    assert {"name": "topics", "configMap": {"name": "prod-tasks-topics-hook"}} in volumes


def test_the_second_migration_step_is_a_separate_hook(render: Render) -> None:
    """O6: the second step of a migration breaks pods of the previous version, so it is an
    optional hook after an upgrade."""
    assert "prod-tasks-migrate-after" not in {
        each["metadata"]["name"] for each in render.objects("everything")
    }
    asked = render.objects("everything", "--set", "migrate.after={migrate,--step,post}")
    job = named(asked, "Job", "prod-tasks-migrate-after")
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "post-upgrade"
    assert container_of(job)["args"] == ["migrate", "--step", "post"]
    # The policies of the earlier hooks are deleted by then, so this hook has its own.
    policy = named(asked, "NetworkPolicy", "prod-tasks-migrate")
    assert policy["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade,post-upgrade"


def test_a_configured_authority_is_verified(render: Render) -> None:
    """O5: with the certificate authority of PostgreSQL the driver must verify, unless the URL
    differs."""
    given = ("--set", "postgres.caSecret.name=ca")
    modes = {
        environment_of(workload(objects, "stages")).get("PGSSLMODE")
        for objects in (render.objects("minimal", *given), render.objects("minimal"))
    }
    assert modes == {"verify-full", None}


def test_declared_topics_reach_hook_and_services(render: Render) -> None:
    """O13: hook and services receive the declared topics unchanged, and restart after a
    change."""
    objects = render.objects("everything")
    text = "[topics.events]\nretention_days = 14\n"
    for name in ("prod-tasks-topics", "prod-tasks-topics-hook"):
        assert named(objects, "ConfigMap", name)["data"] == {"topics.toml": text}
    changed = render.objects("everything", "--set", "topics.file=other")
    for component in SERVICES:
        assert pod_of(workload(objects, component)) != pod_of(workload(changed, component))
        assert "PENSTOCK_TOPICS_FILE" in environment_of(workload(objects, component))


def test_each_service_can_have_its_own_user(render: Render) -> None:
    """O13: each service can override the Kafka user and the PostgreSQL role."""
    objects = render.objects("strimzi-cnpg")
    users = {
        component_of(each): (
            environment_of(each).get("PENSTOCK_KAFKA_USER"),
            environment_of(each).get("PENSTOCK_POSTGRES", {}).get("secretKeyRef", {}).get("name"),
        )
        for each in workloads(objects)
    }
    assert users == {
        **{name: (f"penstock-{name}", f"tasks-{name}") for name in SERVICES},
        "migrate": (None, "tasks-owner"),
        "topics": ("penstock-topics", None),
    }
    for component in ("gateway", "topics"):
        sources = [
            source["secret"]["name"]
            for volume in pod_of(workload(objects, component))["spec"]["volumes"]
            for source in volume.get("projected", {}).get("sources", [])
        ]
        assert f"penstock-{component}" in sources
        assert "penstock" not in sources


def test_an_empty_override_wins(render: Render) -> None:
    """O13: an empty value of a service overrides the default."""
    options = (
        "protocol=PLAINTEXT",
        "sasl.mechanism=",
        "sasl.user=",
        "sasl.passwordSecret.name=",
        "tls.caSecret.name=",
    )
    objects = render.objects("strimzi-cnpg", *(f"--set=stages.kafka.{each}" for each in options))
    assert "PENSTOCK_KAFKA_USER" not in environment_of(workload(objects, "stages"))
    assert "kafka" not in {
        volume["name"] for volume in pod_of(workload(objects, "stages"))["spec"]["volumes"]
    }
    assert "PENSTOCK_KAFKA_USER" in environment_of(workload(objects, "callbacks"))
    bare = render.objects("everything", "--set=stages.pod.priorityClassName=")
    assert "priorityClassName" not in pod_of(workload(bare, "stages"))["spec"]
    assert pod_of(workload(bare, "gateway"))["spec"]["priorityClassName"] == "tasks"


def test_keda_scales_by_the_lag_of_the_type(render: Render) -> None:
    """O13: KEDA reads the topic and group of the type's workers, with the same offset reset."""
    objects = render.objects("keda")
    environment = environment_of(workload(objects, "worker-resize"))
    # Mounted files do not exist here and do not matter.
    settings = WorkerSettings.load(
        {name: environment[name] for name in ("PENSTOCK_KAFKA", "PENSTOCK_PREFIX", "PENSTOCK_OBJECTS")}
    )
    for component, type_name in (("worker-resize", "media_Resize"), ("worker-mail", "mail")):
        scaled = named(objects, "ScaledObject", f"prod-penstock-{component}")["spec"]
        assert named(objects, "Deployment", scaled["scaleTargetRef"]["name"])["spec"].get("replicas") is None
        (trigger,) = scaled["triggers"]
        assert trigger["type"] == "kafka"
        assert trigger["metadata"]["consumerGroup"] == workers_group(settings.prefix, type_name)
        assert trigger["metadata"]["topic"] == settings.prefix + ready(type_name, 8).name
        assert trigger["metadata"]["bootstrapServers"] == settings.kafka
        assert trigger["metadata"]["offsetResetPolicy"] == "earliest"
        # KEDA accepts only strings.
        assert all(isinstance(value, str) for value in trigger["metadata"].values())
        bounds = (scaled["minReplicaCount"], scaled["maxReplicaCount"])
        assert bounds == ((0, 8) if type_name == "media_Resize" else (1, 4))
    assert named(objects, "Deployment", "prod-penstock-worker-thumbs")["spec"]["replicas"] == 0


def test_an_api_key_is_a_variable_or_a_file(render: Render) -> None:
    """O5: a worker has its API key either as a variable or as a mounted file that a variable
    names."""
    by_variable = environment_of(workload(render.objects("keda"), "worker-thumbs"))
    assert by_variable["PENSTOCK_API_KEY"] == {"secretKeyRef": {"name": "thumbs-key", "key": "key"}}
    assert "PENSTOCK_API_KEY_FILE" not in by_variable
    index = 2
    found = workload(
        render.objects("keda", "--set", f"workers[{index}].apiKeySecret.asFile=true"), "worker-thumbs"
    )
    environment = environment_of(found)
    assert "PENSTOCK_API_KEY" not in environment
    file = Path(environment["PENSTOCK_API_KEY_FILE"])
    (mount,) = (one for one in container_of(found)["volumeMounts"] if one["mountPath"] == str(file.parent))
    (volume,) = (one for one in pod_of(found)["spec"]["volumes"] if one["name"] == mount["name"])
    assert volume["secret"]["secretName"] == "thumbs-key"
    assert volume["secret"]["items"] == [{"key": "key", "path": file.name}]
    assert "subPath" not in mount


def test_a_saturated_type_gets_all_its_replicas(render: Render) -> None:
    """O13: the lag of a full window requests the maximum number of replicas."""
    objects = render.objects("keda")
    floor = int(environment_of(workload(objects, "task-sync"))["PENSTOCK_WINDOW_FLOOR"])
    assert floor == TaskSyncSettings.load({}).window_floor
    scaled = named(objects, "ScaledObject", "prod-penstock-worker-resize")["spec"]
    threshold = int(scaled["triggers"][0]["metadata"]["lagThreshold"])
    assert floor / threshold >= scaled["maxReplicaCount"]
    # An explicit threshold wins; the default follows the window floor.
    mail = named(objects, "ScaledObject", "prod-penstock-worker-mail")["spec"]
    assert mail["triggers"][0]["metadata"]["lagThreshold"] == "500"
    other = named(render.objects("everything"), "ScaledObject", "prod-tasks-worker-all")["spec"]
    assert other["triggers"][0]["metadata"]["lagThreshold"] == "5"


@pytest.mark.parametrize("name", ["keda", "everything"])
def test_keda_authenticates_like_the_worker(render: Render, name: str) -> None:
    """O13: the trigger uses the authority, certificate and user of the worker, from the same
    secrets."""
    objects = render.objects(name)
    for scaled in of_kind(objects, "ScaledObject"):
        trigger = scaled["spec"]["triggers"][0]
        found = workload(objects, component_of(scaled))
        environment = environment_of(found)
        authentication = named(objects, "TriggerAuthentication", trigger["authenticationRef"]["name"])["spec"]
        given = {each["parameter"]: (each["name"], each["key"]) for each in authentication["secretTargetRef"]}
        mounted = {
            item["path"]: (source["secret"]["name"], item["key"])
            for volume in pod_of(found)["spec"]["volumes"]
            for source in volume.get("projected", {}).get("sources", [])
            for item in source["secret"]["items"]
        }
        wanted = {
            parameter: mounted[path]
            for parameter, path in (
                ("ca", "ca.crt"),
                ("cert", "client.crt"),
                ("key", "client.key"),
                ("password", "password"),
            )
            if path in mounted
        }
        if isinstance(user := environment.get("PENSTOCK_KAFKA_USER"), dict):
            wanted["username"] = (user["secretKeyRef"]["name"], user["secretKeyRef"]["key"])
        assert given == wanted
        assert trigger["metadata"]["tls"] == "enable"
        mechanism = environment.get("PENSTOCK_KAFKA_MECHANISM")
        assert trigger["metadata"].get("sasl") == {"SCRAM-SHA-256": "scram_sha256", None: None}[mechanism]


def test_keda_reads_a_plain_user_name_from_the_worker(render: Render) -> None:
    """O13: KEDA reads a user name that is not a secret from the environment of the scaled
    container."""
    options = ("--set", "kafka.protocol=SASL_SSL", "--set", "kafka.sasl.mechanism=PLAIN", "--set")
    objects = render.objects("keda", *options, "kafka.sasl.user=penstock,kafka.sasl.passwordSecret.name=p")
    authentication = named(objects, "TriggerAuthentication", "prod-penstock-worker-resize")["spec"]
    (taken,) = authentication["env"]
    found = workload(objects, "worker-resize")
    assert taken["parameter"] == "username"
    assert taken["containerName"] == container_of(found)["name"]
    assert environment_of(found)[taken["name"]] == "penstock"


def test_keda_requests_tokens_like_the_worker(render: Render) -> None:
    """O13: with OAUTHBEARER, KEDA uses the issuer, client and scopes of the worker."""
    oauth = "tokenUrl=https://login.example.com/token,clientId=penstock,clientSecret.name=client,scope=kafka offline"
    settings = ["protocol=SASL_SSL", "sasl.mechanism=OAUTHBEARER"]
    settings += [f"sasl.oauth.{each}" for each in oauth.split(",")]
    objects = render.objects("keda", *(f"--set=kafka.{each}" for each in settings))
    metadata = named(objects, "ScaledObject", "prod-penstock-worker-mail")["spec"]["triggers"][0]["metadata"]
    environment = environment_of(workload(objects, "worker-mail"))
    assert metadata["sasl"] == "oauthbearer"
    assert metadata["oauthTokenEndpointUri"] == environment["PENSTOCK_KAFKA_TOKEN_URL"]
    assert (
        metadata["scopes"].split(",") == environment["PENSTOCK_KAFKA_SCOPE"].split() == ["kafka", "offline"]
    )
    authentication = named(objects, "TriggerAuthentication", "prod-penstock-worker-mail")["spec"]
    assert [environment[taken["name"]] for taken in authentication["env"]] == ["penstock"]
    assert {"parameter": "password", "name": "client", "key": "client-secret"} in authentication[
        "secretTargetRef"
    ]


def test_routes_name_the_gateway(render: Render) -> None:
    """O13: Ingress and HTTPRoute name the gateway's Service and one of its ports."""
    objects = render.objects("everything")
    (service,) = of_kind(objects, "Service")
    ports = {port["name"]: port["port"] for port in service["spec"]["ports"]}
    (ingress,) = of_kind(objects, "Ingress")
    for rule in ingress["spec"]["rules"]:
        (path,) = rule["http"]["paths"]
        assert path["backend"]["service"]["name"] == service["metadata"]["name"]
        assert path["backend"]["service"]["port"]["name"] in ports
    assert ingress["spec"]["tls"] == [
        {"secretName": "tasks-tls", "hosts": ["tasks.example.com", "*.tasks.example.com"]}
    ]
    (route,) = of_kind(objects, "HTTPRoute")
    assert route["spec"]["parentRefs"] == [
        {"name": "public", "namespace": "gateways", "sectionName": "https"}
    ]
    (rule,) = route["spec"]["rules"]
    assert rule["backendRefs"] == [{"name": service["metadata"]["name"], "port": ports["http"]}]


def test_the_pod_monitor_reads_every_service(render: Render) -> None:
    """O13: one PodMonitor reads /metrics of every replica on its named port."""
    (monitor,) = of_kind(render.objects("everything"), "PodMonitor")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert monitor["spec"]["namespaceSelector"] == {"matchNames": ["tasks"]}
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    # Alerts use job names such as penstock-gateway, which do not depend on the release name.
    assert endpoint["relabelings"] == [
        {
            "sourceLabels": ["__meta_kubernetes_pod_label_app_kubernetes_io_component"],
            "targetLabel": "job",
            "replacement": "penstock-$1",
        }
    ]
    assert (endpoint["port"], endpoint["path"], endpoint["interval"]) == ("metrics", "/metrics", "15s")


def test_the_chart_has_the_version_of_the_code() -> None:
    """O13: the default tag of the image is the version of the code."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def _credentials(environment: dict[str, Any]) -> set[str]:
    """What the variables of a container take from secrets that authenticate it."""
    names = ("PENSTOCK_POSTGRES", "PENSTOCK_KAFKA_USER")
    return {json.dumps(environment[name]) for name in names if name in environment}


def test_each_service_has_its_own_credentials(render: Render) -> None:
    """O5: `{service}` in the name of a secret or user stands for the service, so no two services
    have the same. Values that share credentials are refused, unless the release permits it."""
    for values in ("minimal", "strimzi-cnpg"):
        objects = render.objects(values)
        found = [_credentials(environment_of(workload(objects, name))) for name in SERVICES]
        assert all(found)
        assert sum(map(len, found)) == len(set().union(*found))
    sasl = ("--set=kafka.protocol=SASL_SSL,kafka.sasl.mechanism=PLAIN,kafka.sasl.passwordSecret.name=s",)
    for shared, message in (
        (("--set=postgres.url.name=db",), "postgres.url.name=db"),
        ((*sasl, "--set=kafka.sasl.user=one"), "kafka.sasl.user=one"),
        ((*sasl, "--set=kafka.sasl.userSecret.name=one"), "kafka.sasl.userSecret.name=one"),
        (("--set=kafka.protocol=SSL,kafka.tls.clientSecret.name=one",), "kafka.tls.clientSecret.name=one"),
    ):
        refused = render.run("minimal", *shared)
        assert refused.returncode
        assert message in refused.stderr
        assert "{service}" in refused.stderr
        assert not render.run("minimal", *shared, "--set=sharedCredentials=true").returncode


def test_the_metrics_token_is_asked_and_sent(render: Render) -> None:
    """O4, O5: with a token in the values every service asks for it, and the PodMonitor sends it."""
    objects = render.objects("everything")
    secret = {"name": "penstock-metrics", "key": "token"}
    for name in SERVICES:
        assert environment_of(workload(objects, name))["PENSTOCK_METRICS_TOKEN"] == {"secretKeyRef": secret}
    (monitor,) = of_kind(objects, "PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["authorization"]["credentials"] == secret


def test_the_hook_grants_the_rights_of_the_roles(render: Render) -> None:
    """O5: with a role for each service, the hook grants what the new tables need."""
    arguments = container_of(workload(render.objects("minimal"), "migrate"))["args"]
    assert arguments == ["migrate", "--step", "pre", "--roles"]
    assert "--roles" not in container_of(workload(render.objects("managed"), "migrate"))["args"]
