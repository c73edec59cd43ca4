"""deploy/k8s, rendered: what Kubernetes' own schemas, elasticd's own parsers and its own pages say of it."""

from __future__ import annotations

import copy
import functools
import json
import os
import re
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate
import pytest
import yaml

from deploy.k8s import rules
from elasticd.errors import StoreUnavailable, UsageError
from elasticd_agent.config.quantities import parse_seconds
from elasticd_agent.store.etcd.store import EtcdStore
from elasticd_agent.telemetry.metrics_server import HealthProbeResult, MetricsServer, MonitoringPages
from elasticd_daemon.api import routes as api
from elasticd_daemon.config import load as variables
from elasticd_daemon.config.agent_settings import NodeSettings
from elasticd_daemon.config.documents import parse
from elasticd_daemon.config.job_file import read_job
from tests.deploy.k8s.machine import answers
from tests.deploy.k8s.manifests import (
    DAEMONS,
    K8S,
    OURS,
    OVERLAYS,
    PAGE,
    ROOT,
    Object,
    Pod,
    accepted,
    agents,
    blocks,
    expanded,
    kubectl_calls,
    mounted,
    of_kind,
    one,
    overlay,
    pods,
    render,
    rendered,
    secrets_of,
    writable,
)
from tests.etcd import etcd_servers

EVERY = (*(f"overlays/{name}" for name in OVERLAYS), "sample-job")
VERSIONS = ("1.25", "1.37")
"""Of Kubernetes: the oldest that is supported (docs/kubernetes.md says so), and the newest there is a schema of."""
CUSTOM = {"PodMonitor", "PrometheusRule"}
"""Not Kubernetes' own: the operator checks them. Rules go through promtool in tests/deploy/prometheus."""
VALUES = {"ELASTICD_NODE": "gpu-1.example.com", "ELASTICD_LOCAL_ADDR": "10.1.2.3", "POD_NAME": "elasticd-etcd-1"}


def wrong(objects: Sequence[Object], version: str) -> list[str]:
    return [found for one_ in objects if (found := _wrong(json.dumps(one_), version))]


@functools.cache
def _wrong(text: str, version: str) -> str:
    """Most objects are in most overlays: each is looked at once."""
    found = json.loads(text)
    if found["kind"] in CUSTOM:
        return ""
    try:
        kubernetes_validate.validate(found, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return f"{found['kind']} {found['metadata']['name']}: {error.message}"
    return ""


# --- Kubernetes' own word ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", EVERY)
def test_all_objects_are_valid(path: str, version: str) -> None:
    assert wrong(rendered(path), version) == []


def test_oldest_version_matches_the_page() -> None:
    assert f"from Kubernetes {VERSIONS[0]} on" in PAGE.read_text()
    assert kubernetes_validate.latest_version().startswith(VERSIONS[1]), "a newer schema is there: raise VERSIONS"


def test_misspelled_field_is_found() -> None:
    broken = copy.deepcopy(one(overlay("etcd"), "DaemonSet"))
    broken["spec"]["template"]["spec"]["terminationGraceSeconds"] = 1
    assert wrong([broken], VERSIONS[0])


@pytest.mark.parametrize("path", EVERY)
def test_api_server_keeps_every_field(path: str) -> None:
    """What a real one stored otherwise: `kubectl diff -k` was never empty, and `apply --server-side` was refused."""
    for found in rendered(path):
        who = f"{found['kind']} {found['metadata']['name']}"
        assert [value for value in values(found) if value == []] == [], f"{who}: forgotten, and different ever after"
        assert "globalDefault" not in found, f"{who}: false is forgotten"
        for name, quantity in quantities(found):
            assert isinstance(quantity, str), f"{who}: {name} becomes {str(quantity)!r}"
    ports = [port for service in of_kind(rendered(path), "Service") for port in service["spec"]["ports"]]
    ports += [port for pod in pods(rendered(path)) for c in pod.containers for port in c.get("ports", ())]
    assert [port for port in ports if port.get("protocol") != "TCP"] == [], "part of a port's key"


def values(of: Any) -> Iterator[Any]:
    yield of
    for inner in of.values() if isinstance(of, dict) else of if isinstance(of, list) else ():
        yield from values(inner)


def quantities(of: Object) -> Iterator[tuple[str, Any]]:
    for found in values(of):
        if isinstance(found, dict) and isinstance(found.get("resources"), dict):
            for kind in ("requests", "limits"):
                yield from found["resources"].get(kind, {}).items()


def test_own_agent_toml_replaces_the_overlays(tmp_path: Path) -> None:
    """By the words of the page, from outside of deploy/k8s."""
    generator = re.search(r"^```yaml\n(configMapGenerator:.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    there = os.path.relpath(K8S / "overlays" / "external-etcd", tmp_path.resolve())
    (tmp_path / "kustomization.yaml").write_text(f"resources: [{there}]\n{generator[1]}")
    (tmp_path / "agent.toml").write_text("# mine\n")
    found = render(tmp_path)
    (settings,) = of_kind(found, "ConfigMap")
    assert settings["data"] == {"agent.toml": "# mine\n"}
    assert agents(found).volumes["config"]["configMap"]["name"] == settings["metadata"]["name"]


def test_ipv6_patch_of_the_page_sets_a_known_variable() -> None:
    patch = re.search(r"`({op: add, path: /spec/template/spec/containers/0/env/-.*?})`", PAGE.read_text())
    given = yaml.safe_load(patch[1])["value"]
    read = variables.read_overrides(NodeSettings, {given["name"]: given["value"]})
    assert {key: said.value for key, said in read.items()} == {"http.bind": "::"}


def test_components_can_be_combined(tmp_path: Path) -> None:
    there = os.path.relpath(K8S, tmp_path.resolve())
    names = ("prometheus", "rdma", "host-network", "runtime-class")
    (tmp_path / "kustomization.yaml").write_text(
        yaml.safe_dump(
            {
                "resources": [f"{there}/overlays/external-etcd"],
                "components": [f"{there}/components/{name}" for name in names],
            }
        )
    )
    found = render(tmp_path)
    assert wrong(found, VERSIONS[1]) == []
    spec = agents(found).spec
    assert (spec["hostNetwork"], spec["runtimeClassName"]) == (True, "nvidia")
    assert [c["name"] for c in spec["initContainers"]] == ["memlock", "state"]


def test_node_health_lets_the_agents_read_nodes_and_write_the_status_of_their_own(tmp_path: Path) -> None:
    there = os.path.relpath(K8S, tmp_path.resolve())
    text = {"resources": [f"{there}/overlays/etcd"], "components": [f"{there}/components/node-health"]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(text))
    found = render(tmp_path)
    assert wrong(found, VERSIONS[1]) == []
    pod, account = agents(found), one(found, "ServiceAccount")
    assert (pod.spec["serviceAccountName"], pod.spec["automountServiceAccountToken"]) == ("elasticd-agent", True)
    subject = {"kind": "ServiceAccount", **{key: account["metadata"][key] for key in ("name", "namespace")}}
    assert one(found, "ClusterRoleBinding")["subjects"] == [subject]
    assert one(found, "ClusterRoleBinding")["roleRef"]["name"] == one(found, "ClusterRole")["metadata"]["name"]
    rights = {
        (what, verb)
        for rule in one(found, "ClusterRole")["rules"]
        for what in rule["resources"]
        for verb in rule["verbs"]
    }
    assert rights == {("nodes", "get"), ("nodes/status", "patch")}, "what health/kubernetes_node.py asks for"
    policy = one(found, "ValidatingAdmissionPolicy")
    assert one(found, "ValidatingAdmissionPolicyBinding")["spec"]["policyName"] == policy["metadata"]["name"]
    given = {e["name"]: e["value"] for e in pod.container("agent")["env"] if e["name"].startswith("ELASTICD_HEALTH")}
    read = variables.read_overrides(NodeSettings, given)
    assert {key: said.value for key, said in read.items()} == {"health.kubernetes": "report"}


# --- the agents' pods -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OVERLAYS)
def test_scheduling_requirements(name: str) -> None:
    found = overlay(name)
    pod = agents(found)
    container = pod.container("agent")
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod.spec["tolerations"]
    assert pod.spec["nodeSelector"] == {"elasticd.dev/agent": "true"}
    assert "runtimeClassName" not in pod.spec, "only as an option"
    assert one(found, "PriorityClass")["preemptionPolicy"] == "Never", "a shared cluster's pods are not evicted"
    shm = pod.volumes[mounted(container, "/dev/shm")["name"]]["emptyDir"]  # type: ignore[index]
    assert shm["medium"] == "Memory"
    assert re.fullmatch(r"\d+Gi", shm["sizeLimit"])
    assert one(found, "PriorityClass")["metadata"]["name"] == pod.spec["priorityClassName"]
    assert pod.owner["spec"]["updateStrategy"]["rollingUpdate"] == {"maxUnavailable": 1, "maxSurge": 0}
    assert of_kind(found, "ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding") == []
    volumes = pod.volumes
    assert volumes["state"]["hostPath"]["path"] == "/var/lib/elasticd"
    claim = volumes["checkpoints"]["persistentVolumeClaim"]["claimName"]
    assert one(found, "PersistentVolumeClaim")["metadata"]["name"] == claim
    assert one(found, "PersistentVolumeClaim")["spec"]["accessModes"] == ["ReadWriteMany"]


@pytest.mark.parametrize("path", EVERY)
def test_pods_have_minimal_privileges(path: str) -> None:
    for pod in pods(rendered(path)):
        assert pod.spec["automountServiceAccountToken"] is False, pod.name
        assert pod.spec["enableServiceLinks"] is False, pod.name
        assert pod.spec["securityContext"]["runAsNonRoot"] is True, pod.name
        assert pod.spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, pod.name
        for container in pod.containers:
            who = f"{pod.name} {container['name']}"
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False, who
            assert context["readOnlyRootFilesystem"] is True, who
            assert "privileged" not in context, who
            assert context["capabilities"]["drop"] == ["ALL"], who
            # Only this one is root, and only to give the directory away.
            is_root = container["name"] == "state"
            assert ("add" in context["capabilities"], "runAsUser" in context) == (is_root, is_root), who


@pytest.mark.parametrize("name", DAEMONS)
def test_drain_fits_into_the_termination_grace_period(name: str) -> None:
    drain_s = parse_seconds(toml(name)["drain_timeout"])
    assert agents(overlay(name)).spec["terminationGracePeriodSeconds"] >= drain_s + 30
    assert f"`terminationGracePeriodSeconds` ({drain_s + 60:.0f} s)" in PAGE.read_text()


@pytest.mark.parametrize("name", DAEMONS)
def test_paths_of_agent_toml_are_mounted_and_writable(name: str) -> None:
    pod = agents(overlay(name))
    container = pod.container("agent")
    settings, places = toml(name), writable(pod, container)
    assert {settings["state_dir"], settings["run_dir"], *settings["health"]["directories"], "/tmp"} < places
    assert settings["limits"]["directories"] == settings["health"]["directories"] == ["/checkpoints"]
    created = secrets_of([words for block in blocks() for words in kubectl_calls(block)])
    read = [settings["store"][key] for key in ("ca", "cert", "key")]
    read += [settings["http"][key] for key in ("token_file", "tls_cert", "tls_key", "tls_ca")]
    for path in read:
        mount = mounted(container, path)
        assert mount is not None, path
        secret = pod.volumes[mount["name"]]["secret"]
        assert path.removeprefix(mount["mountPath"] + "/") in created[secret["secretName"]], path
        assert secret["defaultMode"] == 0o440, "elasticd reads no secret that others can read"
    assert settings["http"]["port"] == {p["name"]: p["containerPort"] for p in container["ports"]}["http"]
    assert container["args"][-1] == mounted(container, "/etc/elasticd/agent.toml")["mountPath"]  # type: ignore[index]


@pytest.mark.parametrize("name", DAEMONS)
def test_variables_are_keys_of_agent_toml(name: str) -> None:
    """A misspelled one would be refused by the agent, and by nobody before."""
    known = {variables.variable_name(key): key for key, _ in variables.config_keys(NodeSettings)}
    given = {e["name"]: e for e in agents(overlay(name)).container("agent")["env"]}
    fields = {n: e["valueFrom"]["fieldRef"]["fieldPath"] for n, e in given.items() if n.startswith("ELASTICD_")}
    assert set(fields) <= set(known)
    assert fields["ELASTICD_NODE"] == "spec.nodeName"
    assert fields["ELASTICD_LOCAL_ADDR"] == "status.podIP"
    # In the pod's network everything may be listened at, on the node's only what is the cluster's.
    bound = fields.get("ELASTICD_HTTP_BIND", toml(name)["http"]["bind"])
    assert bound == ("status.podIP" if name == "host-network" else "0.0.0.0")


def test_service_variables_of_kubernetes_are_refused() -> None:
    """Why enableServiceLinks is false."""
    with pytest.raises(UsageError, match="ELASTICD_STORE_PORT: is not a variable elasticd reads"):
        variables.read_overrides(NodeSettings, {"ELASTICD_STORE_PORT": "tcp://10.0.0.1:29400"})


def test_host_network_uses_cluster_dns_and_a_free_port() -> None:
    pod = agents(overlay("host-network"))
    assert (pod.spec["hostNetwork"], pod.spec["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    taken = [p["hostPort"] for p in pod.container("agent")["ports"]]
    assert taken == [9411]
    policy = one(overlay("host-network"), "NetworkPolicy", "elasticd-etcd")
    assert any("ipBlock" in who for who in policy["spec"]["ingress"][0]["from"])


def test_rdma_requests_adapters_and_checks_the_memory_limit() -> None:
    pod = agents(overlay("rdma"))
    limits = {"nvidia.com/gpu": "8", "rdma/rdma_shared_device_a": "1"}
    assert pod.container("agent")["resources"]["limits"] == limits
    script = pod.container("memlock")["command"]
    done = subprocess.run(["bash", "-c", 'ulimit -l 64; exec "$@"', "-", *script], capture_output=True, text=True)
    assert done.returncode == 1
    assert "this node lets containers pin 64 KiB" in done.stderr


def test_state_directory_gets_its_owner_once(tmp_path: Path) -> None:
    """Where we may; the same words as in the pod, but for the path."""
    if os.geteuid() != 0:
        pytest.skip("giving a directory away takes root")
    container = agents(overlay("etcd")).container("state")
    state = tmp_path / "state"
    state.mkdir(mode=0o755)
    script = [word.replace("/var/lib/elasticd", str(state)) for word in container["command"]]
    for _ in range(2):
        # chown and chmod, and nothing else that root may do.
        bound = ["setpriv", "--bounding-set", "-all,+chown,+fowner", "--inh-caps", "-all"]
        subprocess.run([*bound, *script], check=True, timeout=20)
        found = state.stat()
        assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (10001, 10001, 0o700)
    assert sorted(container["securityContext"]["capabilities"]["add"]) == ["CHOWN", "FOWNER"]
    assert [m["mountPath"] for m in container["volumeMounts"]] == ["/var/lib/elasticd"]


# --- etcd -------------------------------------------------------------------------------------------------------------


def test_etcd_members_are_separate_and_outside_gpu_nodes() -> None:
    found = overlay("etcd")
    etcd = one(found, "StatefulSet")
    pod = next(p for p in pods(found) if p.owner is etcd)
    names = [f"{etcd['metadata']['name']}-{n}" for n in range(etcd["spec"]["replicas"])]
    service = one(found, "Service", etcd["spec"]["serviceName"])
    assert (len(names), service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == (3, "None", True)
    assert service["spec"]["selector"].items() <= pod.labels.items()
    budget = one(found, "PodDisruptionBudget")["spec"]
    assert budget == {"maxUnavailable": 1, "selector": {"matchLabels": dict(service["spec"]["selector"])}}
    near = pod.spec["affinity"]
    (gpus,) = near["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert gpus["matchExpressions"] == [
        {"key": key, "operator": "NotIn", "values": ["true"]}
        for key in ("nvidia.com/gpu.present", "elasticd.dev/agent")
    ]
    (apart,) = near["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert (apart["topologyKey"], apart["labelSelector"]["matchLabels"]) == (
        "kubernetes.io/hostname",
        service["spec"]["selector"],
    )
    domain = f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc"
    members = [f"{name}=https://{name}.{domain}:2380" for name in names]
    given = dict(word.removeprefix("--").split("=", 1) for word in pod.container("etcd")["args"])
    assert given["initial-cluster"] == ",".join(members)
    assert (given["client-cert-auth"], given["peer-client-cert-auth"]) == ("true", "true")
    assert toml("etcd")["store"]["endpoints"] == [f"https://{name}.{domain}:2379" for name in names]
    # A certificate is for the names by which members and clients call each other.
    sans = "".join(blocks()).replace("$etcd", domain)
    assert all(f"DNS:{name}.{domain}" in sans for name in names)
    created = secrets_of([words for block in blocks() for words in kubectl_calls(block)])
    container = pod.container("etcd")
    for flag in ("trusted-ca-file", "cert-file", "key-file", "peer-trusted-ca-file", "peer-cert-file", "peer-key-file"):
        mount = mounted(container, given[flag])
        assert mount is not None, flag
        secret = pod.volumes[mount["name"]]["secret"]["secretName"]
        assert given[flag].removeprefix(mount["mountPath"] + "/") in created[secret], flag
    data = mounted(container, given["data-dir"])
    assert data["mountPath"] in writable(pod, container)


def test_etcd_probes_ignore_missing_leader_and_alarms() -> None:
    """A member that is ended every minute can neither elect a leader nor be compacted and defragmented."""
    found = overlay("etcd")
    container = next(p for p in pods(found) if p.owner is one(found, "StatefulSet")).container("etcd")
    paths = {kind: container[kind]["httpGet"]["path"] for kind in ("startupProbe", "livenessProbe", "readinessProbe")}
    asked = parse_qs(urlsplit(paths["livenessProbe"]).query)
    assert asked == {"exclude": ["NOSPACE", "CORRUPT"], "serializable": ["true"]}
    assert paths["startupProbe"] == paths["livenessProbe"]
    with etcd_servers(flags=("--quota-backend-bytes=200000",)) as etcd:
        with closing(EtcdStore(etcd.endpoints)) as store, pytest.raises(StoreUnavailable, match="quota"):
            fill(store)
        said = {kind: status(f"http://127.0.0.1:{etcd.port}{path}") for kind, path in paths.items()}
    assert said == {"startupProbe": 200, "livenessProbe": 200, "readinessProbe": 503}


def test_etcd_patch_of_the_operations_page(tmp_path: Path) -> None:
    """A member that has lost its disk comes back only as one of a cluster that is there."""
    page = (ROOT / "docs" / "operations.md").read_text()
    patches = re.search(r"```yaml\n(  - target: {kind: StatefulSet.*?)```", page, re.DOTALL)
    base = os.path.relpath(K8S / "overlays" / "etcd", tmp_path)
    (tmp_path / "kustomization.yaml").write_text(f"resources: [{base}]\npatches:\n{patches[1]}")

    def given(found: Sequence[Object]) -> Pod:
        return next(p for p in pods(found) if p.owner["kind"] == "StatefulSet")

    before, after = given(overlay("etcd")), given(render(tmp_path))
    arguments = zip(before.container("etcd")["args"], after.container("etcd")["args"], strict=True)
    assert [pair for pair in arguments if pair[0] != pair[1]] == [
        ("--initial-cluster-state=new", "--initial-cluster-state=existing")
    ]
    assert after.owner["spec"]["updateStrategy"] == {"type": "OnDelete"}, "no member that is well is ended meanwhile"


def fill(store: EtcdStore) -> None:
    """Until it refuses: it looks at its size only now and then."""
    for n in range(1000):
        store.compare_and_swap(f"/{n}", None, b"x" * 60_000)


def status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


# --- names that must exist elsewhere ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", EVERY)
def test_container_commands_are_valid(path: str) -> None:
    seen = []
    for pod in pods(rendered(path)):
        for container in pod.containers:
            if container["image"] != OURS:
                continue
            if "command" in container:
                shell, flags, script = container["command"]
                assert (shell, flags) == ("/bin/sh", "-ec")
                assert subprocess.run(["sh", "-n"], input=script, text=True).returncode == 0
            else:
                words = expanded(container, VALUES)
                assert not any("$(" in word for word in words), words
                seen.append(accepted(words))
    wanted = {"overlays/c10d": ["run", "store"], "sample-job": ["submit"]}
    assert sorted(seen) == wanted.get(path, ["agent"])


def test_misspelled_option_is_found() -> None:
    with pytest.raises(UsageError, match="--supervise"):
        accepted(["agent", "--supervise"])
    with pytest.raises(UsageError, match="is_hosts"):
        accepted(["run", "--rdzv-conf=is_hosts=0", "--rdzv-backend=c10d", "--rdzv-endpoint=h", "train.py"])


@pytest.mark.parametrize("path", EVERY)
def test_volumes_secrets_and_config_maps_exist(path: str) -> None:
    found = rendered(path)
    # A job's are those of the agents beside it.
    around = [*found, *(overlay("etcd") if path == "sample-job" else ())]
    maps = {o["metadata"]["name"]: set(o["data"]) for o in of_kind(around, "ConfigMap")}
    claims = {o["metadata"]["name"] for o in of_kind(around, "PersistentVolumeClaim")}
    created = secrets_of([words for block in blocks() for words in kubectl_calls(block)])
    for pod in pods(found):
        for name, volume in pod.volumes.items():
            match volume:
                case {"configMap": {"name": wanted}}:
                    assert wanted in maps, f"{pod.name}: {wanted}"
                case {"secret": {"secretName": wanted, **more}}:
                    assert wanted in created, f"{pod.name}: no command on the page makes {wanted}"
                    assert {item["key"] for item in more.get("items", ())} <= set(created[wanted])
                case {"persistentVolumeClaim": {"claimName": wanted}}:
                    assert wanted in claims, f"{pod.name}: {wanted}"
            used = [m for c in pod.containers for m in c.get("volumeMounts", ()) if m["name"] == name]
            assert used, f"{pod.name}: nobody mounts {name}"
            for mount in used:
                if "subPath" in mount:
                    assert mount["subPath"] in maps[volume["configMap"]["name"]]
        for container in pod.containers:
            assert {m["name"] for m in container.get("volumeMounts", ())} <= set(pod.volumes), pod.name


@pytest.mark.parametrize("path", EVERY)
def test_every_port_has_a_listener(path: str) -> None:
    found = rendered(path)
    ports = {pod.name: ports_of(pod) for pod in pods(found)}

    def selected(selector: dict[str, str]) -> list[Pod]:
        chosen = [pod for pod in pods(found) if selector.items() <= pod.labels.items()]
        assert chosen, f"{selector} selects nobody"
        return chosen

    for pod in pods(found):
        for container in pod.containers:
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                asked = container.get(probe, {})
                port = (asked.get("httpGet") or asked.get("tcpSocket") or {}).get("port")
                assert port is None or port in ports[pod.name], f"{pod.name} {probe}"
    for service in of_kind(found, "Service"):
        for port in service["spec"]["ports"]:
            for pod in selected(service["spec"]["selector"]):
                target = port.get("targetPort", port["port"])
                assert target in {*ports[pod.name], *ports[pod.name].values()}, service["metadata"]["name"]
    for policy in of_kind(found, "NetworkPolicy"):
        targets = selected(policy["spec"]["podSelector"]["matchLabels"])
        for rule in policy["spec"].get("ingress", ()):
            for port in rule.get("ports", ()):
                assert all(port["port"] in ports[pod.name] for pod in targets), policy["metadata"]["name"]
    for monitor in of_kind(found, "PodMonitor"):
        for pod in selected(monitor["spec"]["selector"]["matchLabels"]):
            assert {e["port"] for e in monitor["spec"]["podMetricsEndpoints"]} <= set(ports[pod.name])


@pytest.mark.parametrize("name", OVERLAYS)
def test_probed_routes_are_served_without_a_token(name: str) -> None:
    """By the agent, or by `elasticd run`; etcd's is asked of a real one in test_cluster.py."""
    well = HealthProbeResult(True, "well")
    pages = MonitoringPages(lambda: b"", dict, lambda: well, lambda: well)
    container = agents(overlay(name)).container("agent")
    probes = [container[kind]["httpGet"] for kind in ("startupProbe", "livenessProbe", "readinessProbe")]
    ends = [e for m in of_kind(overlay(name), "PodMonitor") for e in m["spec"]["podMetricsEndpoints"]]
    asked = [(asked["path"], asked["scheme"].lower()) for asked in (*probes, *ends)]
    assert [path for path, _ in asked[:3]] == ["/healthz", "/healthz", "/readyz"]
    if name != "c10d":
        assert {(path in api.PUBLIC_PATHS, scheme) for path, scheme in asked} == {(True, "https")}
        return
    with closing(MetricsServer("127.0.0.1", 0, pages)) as server:
        assert server.address
        for path, scheme in asked:
            assert (answers(f"http://127.0.0.1:{server.address[1]}{path}"), scheme) == (200, "http")


def ports_of(pod: Pod) -> dict[str, int]:
    return {p["name"]: p["containerPort"] for c in pod.containers for p in c.get("ports", ())}


def test_store_address_matches_its_listener() -> None:
    found = overlay("c10d")
    service = one(found, "Service")
    run = expanded(agents(found).container("agent"), VALUES)
    assert f"--rdzv-endpoint={service['metadata']['name']}:{service['spec']['ports'][0]['port']}" in run
    store = next(pod for pod in pods(found) if pod.name == "Deployment elasticd-store")
    assert ports_of(store) == {"store": 29400}
    assert "--port=29400" in store.container("store")["args"]
    assert store.owner["spec"]["strategy"] == {"type": "Recreate"}


def test_sample_job_uses_the_certificates_name_and_is_admitted() -> None:
    (job,) = pods(rendered("sample-job"))
    container = job.container("submit")
    words = expanded(container, {})
    service = one(overlay("etcd"), "Service", "elasticd-agent")
    port = service["spec"]["ports"][0]["port"]
    assert words[words.index("--agent") + 1] == f"https://{service['metadata']['name']}:{port}"
    assert f"DNS:{service['metadata']['name']}," in "".join(blocks())
    assert toml("etcd")["http"]["tls_name"] == service["metadata"]["name"]
    policy = one(overlay("etcd"), "NetworkPolicy", "elasticd-agent")["spec"]["ingress"]
    labels = [who["podSelector"]["matchLabels"] for rule in policy for who in rule["from"]]
    assert any(label.items() <= job.labels.items() for label in labels)
    for path in (words[1], words[words.index("--token-file") + 1], words[words.index("--ca") + 1]):
        assert mounted(container, path), path


def test_agents_accept_the_sample_job() -> None:
    maps = {o["metadata"]["name"]: o["data"] for o in of_kind(rendered("sample-job"), "ConfigMap")}
    job = read_job(maps["elasticd-sample-job"]["job.toml"].encode(), "toml", "job.toml")
    allowed = toml("etcd")["limits"]["directories"]
    assert str(job.workdir).startswith(tuple(allowed))
    assert str(job.checkpoint_dir).startswith(tuple(allowed))
    script = (K8S / "sample-script" / "train.py").read_text()
    assert maps["elasticd-sample-script"]["train.py"] == script
    assert script == (ROOT / "examples" / "plain_with_elasticd.py").read_text(), "word for word"


# --- Prometheus -------------------------------------------------------------------------------------------------------


def test_rules_match_deploy_prometheus() -> None:
    assert rules.WRITTEN.read_text() == rules.written(), "make docs"
    found = one(overlay("prometheus"), "PrometheusRule")["spec"]["groups"]
    plain = [yaml.safe_load((rules.RULES / name).read_text())["groups"] for name in ("recording.yaml", "alerts.yaml")]
    assert found == [group for groups in plain for group in groups]


def test_dashboard_matches_deploy_grafana() -> None:
    assert rules.DASHBOARD_WRITTEN.read_text() == rules.dashboard(), "make docs"
    found = one(overlay("prometheus"), "ConfigMap", "elasticd-dashboard")
    assert found["data"] == {path.name: path.read_text() for path in rules.DASHBOARDS}
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_metrics_in_the_rules_exist() -> None:
    groups = one(overlay("prometheus"), "PrometheusRule")["spec"]["groups"]
    text = "".join(rule["expr"] for group in groups for rule in group["rules"])
    pages = (ROOT / "docs" / "metrics.md").read_text() + (ROOT / "docs" / "node-metrics.md").read_text()
    served = set(re.findall(r"^\| `(elasticd_\w+)`", pages, re.MULTILINE))
    named = set(re.findall(r"\belasticd_\w+", text))
    assert named
    # A histogram is served as three.
    assert {name for name in named - served if re.sub("_(bucket|count|sum)$", "", name) not in served} == set()


def test_prometheus_uses_the_certificates_name() -> None:
    (endpoint,) = one(overlay("prometheus"), "PodMonitor")["spec"]["podMetricsEndpoints"]
    created = secrets_of([words for block in blocks() for words in kubectl_calls(block)])
    ca = endpoint["tlsConfig"]["ca"]["secret"]
    assert endpoint["tlsConfig"]["serverName"] == toml("prometheus")["http"]["tls_name"]
    assert ca["key"] in created[ca["name"]]
    alerts = (rules.RULES / "alerts.yaml").read_text()
    assert one(overlay("prometheus"), "PodMonitor")["metadata"]["name"] in alerts, "the alerts look for this job"


def toml(name: str) -> dict[str, Any]:
    """The agent.toml that the pods of that overlay read."""
    pod = agents(overlay(name))
    wanted = pod.volumes["config"]["configMap"]["name"]
    return parse(one(overlay(name), "ConfigMap", wanted)["data"]["agent.toml"].encode(), "toml", "agent.toml")


# --- Helm -------------------------------------------------------------------------------------------------------------


def test_chart_has_the_manifests() -> None:
    """As files of its own: helm warns of each symbolic link, and needs the rest of the repository to follow it."""
    assert {path.name: path.read_text() for path in rules.CHART.iterdir() if not path.is_symlink()} == {
        name: (K8S / source).read_text() for name, source in rules.CHART_MANIFESTS.items()
    }, "make docs"
