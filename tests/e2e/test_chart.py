"""The chart makes what its values say, and Kubernetes takes it."""

import json
import re
import shlex
import shutil

import pytest
import yaml

from chart import (
    CHART,
    DEVICE_PLUGIN,
    KUBERNETES,
    MONITORING,
    MTLS,
    ON_THE_SECOND,
    SCALED,
    TWO_GPUS,
    containers,
    merged,
    objects,
    one,
    pods,
    run,
    schema_complaints,
    security_complaints,
    shape_values,
    template,
    tool,
)
from drafter_service.cli import _parser
from drafter_service.server.health import LIVENESS
from repository import ROOT

SHAPES = ("sidecar", "paired", "node", "deployment", "library")
RESTRICTED = ("sidecar", TWO_GPUS, "deployment")

NO_HOST_PATH = {"socket": {"hostPath": ""}, **MTLS}
EVERYTHING_WATCHED = {
    "metrics": {"podMonitor": {"enabled": True}, "prometheusRule": {"enabled": True}, "dashboard": {"enabled": True}}
}

COMBINATIONS = {
    "sidecar": ("sidecar", {}),
    "sidecar with MPS": ("sidecar", {"gpu": {"mps": {"enabled": True, "activeThreadPercentage": 50}}}),
    "sidecar, two GPUs": (TWO_GPUS, {}),
    "sidecar, a target on four GPUs": (TWO_GPUS, {"gpu": {"dra": {"count": 5}}, "config": {"device": "cuda:4"}}),
    "sidecar, device plugin": ("sidecar", DEVICE_PLUGIN),
    "sidecar on a CPU": ("sidecar", {"gpu": {"mode": "none"}, "config": {"kvBytes": None}}),
    "sidecar with TCP": ("sidecar", MTLS),
    "sidecar, exec probes": ("sidecar", {"probes": {"kind": "exec"}}),
    "sidecar, shared processes": ("sidecar", {"shareProcessNamespace": True}),
    "sidecar, chosen GPU": ("sidecar", {"gpu": {"dra": {"selectors": ['device.attributes["gpu.nvidia.com"].x == 1']}}}),
    "sidecar, closed in": ("sidecar", {"networkPolicy": {"egress": [{"ports": [{"port": 53, "protocol": "UDP"}]}]}}),
    "sidecar, watched": ("sidecar", EVERYTHING_WATCHED),
    "sidecar, unwatched": ("sidecar", {"metrics": {"enabled": False}}),
    "sidecar, a user of OpenShift's": ("sidecar", {"runAsUser": 1000680000, "terminationGracePeriodSeconds": 1000000}),
    "sidecar, traced": ("sidecar", {"tracing": {"enabled": True, "endpoint": "http://collector:4317"}}),
    "paired": ("paired", {}),
    "paired, claim at hand": ("paired", {"gpu": {"dra": {"existingClaim": "mine"}}}),
    "paired, two GPUs": ("paired", ON_THE_SECOND),
    "paired, two GPUs over TCP": ("paired", merged(NO_HOST_PATH, ON_THE_SECOND)),
    "paired, two GPUs in a claim at hand": (
        "paired",
        merged(ON_THE_SECOND, {"gpu": {"dra": {"existingClaim": "mine"}}}),
    ),
    "paired over TCP": ("paired", merged(MTLS, {"target": {"image": ""}})),
    "paired, no host path": ("paired", NO_HOST_PATH),
    "node, no host path": ("node", NO_HOST_PATH),
    "node": ("node", {}),
    "node, device plugin": ("node", merged(DEVICE_PLUGIN, {"gpu": {"runtimeClassName": ""}})),
    "node, second GPU": ("node", {"config": {"device": "cuda:1"}}),
    "node over TCP": ("node", MTLS),
    "deployment": ("deployment", {}),
    "deployment on IPv6": ("deployment", {"listenHost": "::"}),
    "deployment, headless": ("deployment", {"service": {"clusterIP": "None"}}),
    "deployment, scaled": ("deployment", SCALED),
    "deployment, insecure": ("deployment", {"tcp": {"insecure": True, "tlsSecret": ""}}),
    "deployment, by digest": ("deployment", {"image": {"digest": "sha256:" + "0" * 64}}),
    "library": ("library", {}),
    "library, two GPUs": ("library", ON_THE_SECOND),
}

RESTRICTED_COMBINATIONS = [name for name, (shape, _) in COMBINATIONS.items() if shape in RESTRICTED]
RESTRICTED_COMBINATIONS.append("paired, no host path")


def values_of(name):
    shape, changes = COMBINATIONS[name]
    return merged(shape_values(shape), changes)


@pytest.mark.parametrize("name", COMBINATIONS)
def test_kubernetes_takes_every_object(name, tmp_path):
    for version in KUBERNETES:
        found = objects(values_of(name), version=version, apis=[MONITORING])
        assert schema_complaints(found, version, tmp_path / f"{version}.yaml") == []


@pytest.mark.parametrize("name", RESTRICTED_COMBINATIONS)
def test_pods_of_the_shapes_that_promise_it_are_restricted(name):
    assert security_complaints(objects(values_of(name))) == []


@pytest.mark.parametrize("shape", ["paired", "node"])
def test_shapes_with_a_host_path_break_that_rule_alone(shape):
    lines = security_complaints(objects(shape_values(shape)))
    assert lines
    assert all("hostPath" in line for line in lines)


def test_the_restricted_rules_see_what_is_wrong():
    found = objects(shape_values("sidecar"))
    (pod,) = pods(found).values()
    containers(pod)["drafter"]["securityContext"]["allowPrivilegeEscalation"] = True
    assert "allowPrivilegeEscalation" in "".join(security_complaints(found))


def test_the_schemas_of_kubernetes_see_what_is_wrong(tmp_path):
    found = objects(shape_values("sidecar"))
    one(found, "ResourceClaimTemplate")["spec"]["spec"]["devices"]["request"] = []
    assert schema_complaints(found, KUBERNETES[0], tmp_path / "wrong.yaml")


@pytest.mark.parametrize("shape", [*SHAPES, TWO_GPUS])
def test_helm_lints_every_shape(shape):
    command = [tool("helm"), "lint", CHART, "--strict", "--kube-version", f"{KUBERNETES[0]}.0"]
    done = run([*command, "--values", CHART / "ci" / f"{shape}-values.yaml"])
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_sidecar_and_its_target_share_gpu_sockets_and_user():
    found = objects(shape_values("sidecar"))
    pod = one(found, "Deployment")["spec"]["template"]["spec"]
    (drafter,), (target,) = pod["initContainers"], pod["containers"]
    assert (drafter["restartPolicy"], drafter["name"], target["name"]) == ("Always", "drafter", "target")
    assert drafter["resources"]["claims"] == target["resources"]["claims"] == [{"name": "gpu"}]
    claim = {"name": "gpu", "resourceClaimTemplateName": one(found, "ResourceClaimTemplate")["metadata"]["name"]}
    assert pod["resourceClaims"] == [claim]
    sockets = {"name": "sockets", "mountPath": "/run/specdraft"}
    assert sockets in drafter["volumeMounts"]
    assert sockets in target["volumeMounts"]
    for container in (drafter, target):
        assert "runAsUser" not in container["securityContext"]  # the pod's, for both
    assert not {"hostPID", "hostIPC", "hostNetwork"} & set(pod)
    assert "startupProbe" in drafter
    assert "readinessProbe" not in drafter  # a pod whose drafter fails answers all the same


@pytest.mark.parametrize("name", ["sidecar, two GPUs", "paired, two GPUs", "paired, two GPUs over TCP"])
def test_a_drafter_on_a_second_gpu_and_its_target_see_both(name):
    found = objects(values_of(name))
    claim = one(found, "ResourceClaim" if name.startswith("paired") else "ResourceClaimTemplate")
    spec = claim["spec"] if claim["kind"] == "ResourceClaim" else claim["spec"]["spec"]
    (request,) = spec["devices"]["requests"]
    assert request["exactly"] == {"deviceClassName": "gpu.nvidia.com", "allocationMode": "ExactCount", "count": 2}
    both = {}
    for pod in pods(found).values():
        by_name = "resourceClaimName" if claim["kind"] == "ResourceClaim" else "resourceClaimTemplateName"
        assert pod["spec"]["resourceClaims"] == [{"name": "gpu", by_name: claim["metadata"]["name"]}]
        both |= containers(pod)
    variables = {owner: {item["name"]: item["value"] for item in both[owner]["env"]} for owner in both}
    assert sorted(variables) == ["drafter", "target"]
    for owner in both:
        # The whole claim, not one of its requests; and one order, so that an ordinal is one GPU for both.
        assert both[owner]["resources"]["claims"] == [{"name": "gpu"}]
        assert variables[owner]["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert variables["drafter"]["SPECDRAFT_DEVICE"] == "cuda:1"


def test_one_gpu_brings_no_order_of_gpus():
    for name in ("sidecar", "paired", "sidecar, device plugin"):
        for pod in pods(objects(values_of(name))).values():
            for container in containers(pod).values():
                assert "CUDA_DEVICE_ORDER" not in {item["name"] for item in container["env"]}


def test_where_every_gpu_is_visible_an_ordinal_is_one_gpu_for_both():
    values = {"gpu": {"mode": "visible", "runtimeClassName": "nvidia"}, "config": {"device": "cuda:1"}}
    (pod,) = pods(objects(merged(shape_values("sidecar"), values))).values()
    for container in containers(pod).values():
        assert {"name": "CUDA_DEVICE_ORDER", "value": "PCI_BUS_ID"} in container["env"]


def test_an_order_of_gpus_that_is_given_comes_last_and_so_counts():
    mine = {"name": "CUDA_DEVICE_ORDER", "value": "FASTEST_FIRST"}
    found = objects(merged(values_of("sidecar, two GPUs"), {"env": [mine], "target": {"env": [mine]}}))
    for container in containers(pods(found)["release-drafter-service"]).values():
        assert [item for item in container["env"] if item["name"] == mine["name"]][-1] == mine


def test_probes_ask_for_what_they_are_for_and_exec_probes_less_often():
    grpc = containers(pods(objects(values_of("deployment")))["release-drafter-service"])["drafter"]
    services = {kind: grpc[f"{kind}Probe"]["grpc"].get("service", "") for kind in ("startup", "readiness", "liveness")}
    assert services == {"startup": "", "readiness": "", "liveness": LIVENESS}
    values = merged(values_of("deployment"), {"probes": {"kind": "exec"}})
    slow = containers(pods(objects(values))["release-drafter-service"])["drafter"]
    command = slow["livenessProbe"]["exec"]["command"]
    assert _parser().parse_args(command[1:]).service == LIVENESS
    assert slow["livenessProbe"]["periodSeconds"] > grpc["livenessProbe"]["periodSeconds"]
    assert float(command[command.index("--timeout-s") + 1]) < slow["livenessProbe"]["timeoutSeconds"]
    assert environment(objects(values))["SPECDRAFT_HEALTH_PORT"] == "off"


@pytest.mark.parametrize("name", COMBINATIONS)
def test_no_container_has_both_a_claim_and_a_limit_for_a_gpu(name):
    for pod in pods(objects(values_of(name))).values():
        for container in containers(pod).values():
            resources = container.get("resources", {})
            assert not (resources.get("claims") and "nvidia.com/gpu" in resources.get("limits", {}))


@pytest.mark.parametrize("name", [name for name, (shape, _) in COMBINATIONS.items() if shape != "library"])
def test_every_root_file_system_of_the_drafter_is_read_only_and_no_token_is_mounted(name):
    found = objects(values_of(name))
    for pod in pods(found).values():
        drafter = containers(pod).get("drafter")
        assert pod["spec"]["automountServiceAccountToken"] is False
        if drafter:
            assert drafter["securityContext"]["readOnlyRootFilesystem"] is True
            assert {"kernel-cache", "scratch", "sockets"} <= {mount["name"] for mount in drafter["volumeMounts"]}
    assert one(found, "ServiceAccount")["automountServiceAccountToken"] is False


def test_the_key_of_the_service_is_mounted_into_the_service_alone():
    found = objects(merged(shape_values("paired"), MTLS))
    has_key = {name: any("secret" in volume for volume in pod["spec"]["volumes"]) for name, pod in pods(found).items()}
    assert has_key == {"release-drafter-service": True, "release-drafter-service-target": False}


def test_a_pair_shares_one_named_claim():
    found = objects(shape_values("paired"))
    name = one(found, "ResourceClaim")["metadata"]["name"]
    assert [pod["spec"]["resourceClaims"] for pod in pods(found).values()] == [
        [{"name": "gpu", "resourceClaimName": name}]
    ] * 2


def test_services_keep_a_target_with_the_replica_or_node_that_has_its_sequences():
    assert one(objects(values_of("deployment")), "Service")["spec"]["sessionAffinity"] == "ClientIP"
    assert one(objects(values_of("node over TCP")), "Service")["spec"]["internalTrafficPolicy"] == "Local"
    headless = one(objects(values_of("deployment, headless")), "Service")["spec"]
    assert (headless["clusterIP"], "sessionAffinity" in headless) == ("None", False)


def test_objects_of_the_prometheus_operator_are_made_only_where_it_is():
    values = values_of("sidecar, watched")
    kinds = {item["kind"] for item in objects(values, apis=[MONITORING])}
    assert {"PodMonitor", "PrometheusRule", "ConfigMap"} <= kinds
    kinds = {item["kind"] for item in objects(values)}
    assert not {"PodMonitor", "PrometheusRule"} & kinds


def test_selectors_select_the_drafters_pods():
    for name in ("sidecar, watched", "deployment, scaled", "node over TCP"):
        found = objects(merged(values_of(name), EVERYTHING_WATCHED), apis=[MONITORING])
        labels = pods(found)["release-drafter-service"]["metadata"]["labels"]
        selectors = [one(found, "PodMonitor")["spec"]["selector"]["matchLabels"]]
        selectors += [item["spec"]["podSelector"]["matchLabels"] for item in found if item["kind"] == "NetworkPolicy"]
        selectors += [item["spec"]["selector"] for item in found if item["kind"] == "Service"]
        selectors += [
            item["spec"]["selector"]["matchLabels"] for item in found if item["kind"] in {"Deployment", "DaemonSet"}
        ]
        assert all(selector.items() <= labels.items() for selector in selectors)


def environment(found, pod="release-drafter-service"):
    return {item["name"]: item["value"] for item in containers(pods(found)[pod])["drafter"]["env"]}


def test_settings_reach_the_service_by_their_environment_variables():
    config = {"maxDrafts": 4, "carryShare": 0.25, "drainS": 60, "messageBytes": 8388608, "draftVocab": "first:1024"}
    found = objects(merged(values_of("deployment"), {"config": config}))
    variables = environment(found)
    assert variables["SPECDRAFT_MAX_DRAFTS"] == "4"
    assert variables["SPECDRAFT_CARRY_SHARE"] == "0.25"
    assert variables["SPECDRAFT_MESSAGE_BYTES"] == "8388608"
    assert variables["SPECDRAFT_DRAFT_VOCAB"] == "first:1024"
    assert variables["SPECDRAFT_TLS_CERT"] == "/etc/specdraft/tls/tls.crt"
    assert "SPECDRAFT_MAX_BATCH" not in variables
    assert pods(found)["release-drafter-service"]["spec"]["terminationGracePeriodSeconds"] == 70


def test_a_parent_chart_puts_the_sidecar_into_a_pod_of_its_own(tmp_path):
    shutil.copytree(CHART, tmp_path / "charts" / "drafter-service", ignore=shutil.ignore_patterns("docs"))
    (tmp_path / "templates").mkdir()
    (tmp_path / "Chart.yaml").write_text("{apiVersion: v2, name: parent, version: 1.0.0}", encoding="utf-8")
    (tmp_path / "templates" / "pod.yaml").write_text(PARENT_POD, encoding="utf-8")
    found = objects({"drafter-service": shape_values("library")}, chart=tmp_path)
    assert schema_complaints(found, KUBERNETES[0], tmp_path / "all.yaml") == []
    pod = one(found, "Deployment")["spec"]["template"]["spec"]
    assert pod["initContainers"][0]["restartPolicy"] == "Always"
    claim = one(found, "ResourceClaimTemplate")["metadata"]["name"]
    assert pod["resourceClaims"] == [{"name": "gpu", "resourceClaimTemplateName": claim}]
    assert security_complaints(found) == []


PARENT_POD = """
{{- $drafter := index .Subcharts "drafter-service" }}
apiVersion: apps/v1
kind: Deployment
metadata: {name: mine}
spec:
  selector: {matchLabels: {app: mine}}
  template:
    metadata: {labels: {app: mine}}
    spec:
      terminationGracePeriodSeconds: {{ include "drafter-service.gracePeriod" $drafter }}
      securityContext: {{- include "drafter-service.podSecurity" $drafter | nindent 8 }}
      resourceClaims: {{- include "drafter-service.claims" $drafter | nindent 8 }}
      initContainers: {{- include "drafter-service.sidecar" $drafter | nindent 8 }}
      containers:
        - name: target
          image: target:1
          resources: {claims: [{name: gpu}]}
          securityContext: {{- include "drafter-service.containerSecurity" true | nindent 12 }}
          volumeMounts: {{- include "drafter-service.targetMounts" $drafter | nindent 12 }}
      volumes: {{- include "drafter-service.volumes" $drafter | nindent 8 }}
"""


def notes(values, directory):
    """NOTES.txt as a user sees it: `helm template` does not show it."""
    chart = directory / "chart"
    if not chart.exists():
        shutil.copytree(CHART, chart, ignore=shutil.ignore_patterns("docs"))
        shutil.move(chart / "templates" / "NOTES.txt", chart / "notes.txt")
        page = 'apiVersion: v1\nkind: Notes\nmetadata: {name: n}\ntext: {{ tpl (.Files.Get "notes.txt") . | quote }}\n'
        (chart / "templates" / "notes.yaml").write_text(page, encoding="utf-8")
    return one(objects(values, chart=chart), "Notes")["text"]


def test_notes_tell_the_next_step_and_warn_of_what_shares_fate(tmp_path):
    told = {name: notes(values_of(name), tmp_path) for name in COMBINATIONS}
    for name, text in told.items():
        assert ("include" if name.startswith("library") else "rollout status") in text, name
        assert ("MPS shares fate" in text) == (name == "sidecar with MPS")
        assert ("hide none" in text) == ("two GPUs" in name or "four GPUs" in name), name
    assert "device plugin cannot give one GPU to two containers" in told["sidecar, device plugin"]
    on_the_targets = notes(merged(values_of("sidecar, two GPUs"), {"config": {"device": "cuda:0"}}), tmp_path)
    assert "say config.device=cuda:1" in on_the_targets
    assert not any("stays idle" in text for text in told.values())
    assert "It takes cuda:1, in the order of" in told["node, second GPU"]
    assert "It takes the node's first GPU, in" in told["node"]
    assert "The claim has 5 GPUs" in told["sidecar, a target on four GPUs"]
    assert "The drafter takes cuda:4" in told["sidecar, a target on four GPUs"]
    assert "the same GPUs by resourceClaimName: mine." in told["paired, two GPUs in a claim at hand"]
    assert "the same GPU by resourceClaimName: release-drafter-service-gpu." in told["paired"]
    assert "install -d" in told["node"]
    assert "install -d" not in told["node, no host path"]
    assert "lets nobody to the target" not in told["sidecar"]
    assert "lets nobody to the target" in notes(merged(values_of("sidecar"), {"target": {"ports": []}}), tmp_path)
    assert "no PodMonitor" in told["sidecar, watched"]
    assert "whoever reaches the port" in told["deployment, insecure"]


def test_the_dashboard_and_the_rules_arrive_as_they_are_in_the_chart():
    found = objects(values_of("sidecar, watched"), apis=[MONITORING])
    stored = json.loads((CHART / "dashboards" / "specdraft.json").read_text(encoding="utf-8"))
    assert json.loads(one(found, "ConfigMap")["data"]["specdraft.json"]) == stored
    rules = yaml.safe_load((CHART / "alerts" / "rules.yaml").read_text(encoding="utf-8"))
    assert one(found, "PrometheusRule")["spec"] == rules


def test_mps_is_asked_of_nvidias_driver_whatever_class_chooses_the_gpu():
    changes = {"gpu": {"dra": {"deviceClassName": "small.example"}, "mps": {"enabled": True}}}
    found = objects(merged(shape_values("sidecar"), changes))
    devices = one(found, "ResourceClaimTemplate")["spec"]["spec"]["devices"]
    assert devices["requests"][0]["exactly"]["deviceClassName"] == "small.example"
    (config,) = devices["config"]
    assert config["opaque"]["driver"] == "gpu.nvidia.com"
    assert config["opaque"]["parameters"]["sharing"] == {"strategy": "MPS"}


@pytest.mark.parametrize("release", ["123", "1e5", "on", "null"])
def test_names_that_yaml_would_read_as_something_else_stay_names(release, tmp_path):
    values = merged(values_of("sidecar, watched"), {"fullnameOverride": release, "serviceAccount": {"name": "456"}})
    found = objects(values, apis=[MONITORING], release=release)
    assert schema_complaints(found, KUBERNETES[0], tmp_path / "all.yaml") == []
    for item in found:
        assert item["metadata"]["name"].startswith(("456", release))
        assert item["metadata"]["labels"]["app.kubernetes.io/instance"] == release


def test_large_numbers_are_written_as_integers():
    values = values_of("sidecar, a user of OpenShift's")
    text = template(values).stdout
    assert "runAsUser: 1000680000\n" in text
    assert "terminationGracePeriodSeconds: 1000000\n" in text


def test_tolerations_that_are_given_are_those_of_the_pod():
    mine = [{"key": "spot", "operator": "Exists"}]
    of_a_gpu = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    on_a_cpu = {"gpu": {"mode": "none"}}
    expected = [({}, of_a_gpu), ({"tolerations": []}, None), (on_a_cpu, None)]
    expected += [({"tolerations": mine}, mine), ({**on_a_cpu, "tolerations": mine}, mine)]
    for changes, tolerations in expected:
        (pod,) = pods(objects(merged(shape_values("sidecar"), changes))).values()
        assert pod["spec"].get("tolerations") == tolerations


def test_a_target_without_the_hosts_directory_is_not_sent_to_a_socket():
    target = containers(pods(objects(values_of("paired, no host path")))["release-drafter-service-target"])["target"]
    assert "env" not in target
    assert [mount["name"] for mount in target["volumeMounts"]] == ["models"]


def test_where_pods_have_ipv6_addresses_everything_listens_on_both_families():
    variables = environment(objects(values_of("deployment on IPv6")))
    assert (variables["SPECDRAFT_PROBE_HOST"], variables["SPECDRAFT_LISTEN"]) == ("::", "[::]:9000")


def test_a_load_as_long_as_allowed_is_no_lack_of_progress():
    for shape in ("sidecar", "deployment"):
        found = objects(merged(shape_values(shape), {"probes": {"startupSeconds": 1800}}))
        deployment = one(found, "Deployment")["spec"]
        probe = containers(deployment["template"])["drafter"]["startupProbe"]
        assert probe["periodSeconds"] * probe["failureThreshold"] == 1800 < deployment["progressDeadlineSeconds"]


def test_a_cluster_without_a_spare_gpu_can_have_the_old_pod_go_first():
    strategy = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
    for shape in ("sidecar", "deployment"):
        assert "strategy" not in one(objects(shape_values(shape)), "Deployment")["spec"]
        found = objects(merged(shape_values(shape), {"strategy": strategy}))
        assert one(found, "Deployment")["spec"]["strategy"] == strategy


def documented_commands():
    pages = [CHART / "README.md", *sorted((CHART / "docs").glob("*.md"))]
    blocks = [
        block for page in pages for block in re.findall(r"^```\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    ]
    return [
        line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.startswith("helm install")
    ]


@pytest.mark.parametrize("line", documented_commands())
def test_a_command_of_the_guides_works_as_it_stands(line, tmp_path):
    _, _, *arguments = shlex.split(line)
    done = run([tool("helm"), "template", *arguments, "--kube-version", f"{KUBERNETES[0]}.0"], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = [item for item in yaml.safe_load_all(done.stdout) if item]
    assert schema_complaints(found, KUBERNETES[0], tmp_path / "all.yaml") == []


def test_the_helm_at_hand_takes_the_chart_without_being_told_a_kubernetes():
    arguments = next(shlex.split(line)[2:] for line in documented_commands())
    done = run([tool("helm"), "template", *arguments], cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_a_release_with_a_dot_gives_names_that_a_service_may_have():
    found = objects(values_of("deployment"), release="chat.v1")
    assert {item["metadata"]["name"] for item in found} == {"chat-v1-drafter-service"}
