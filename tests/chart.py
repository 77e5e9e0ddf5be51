"""The chart through real tools: helm, the schemas of Kubernetes, the Pod Security admission's own rules."""

import functools
import json
import re
import shutil
import subprocess

import pytest
import yaml

from repository import ROOT

CHART = ROOT / "helm" / "drafter-service"
TOOLS = ROOT / ".venv-chart" / "bin"
KUBERNETES = ("1.34", "1.36")
"""The oldest version with resource.k8s.io/v1, and a recent one."""

TWO_GPUS = "sidecar-two-gpus"
"""Values of no shape's own: a sidecar on the second of its claim's GPUs."""

# Changes of a shape's values.
MTLS = {"tcp": {"enabled": True, "tlsSecret": "tls"}}
SCALED = {"autoscaling": {"enabled": True}}
DEVICE_PLUGIN = {"gpu": {"mode": "devicePlugin"}}
ON_THE_SECOND = {"gpu": {"dra": {"count": 2}}, "config": {"device": "cuda:1"}}

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
MONITORING = "monitoring.coreos.com/v1"


def tool(name):
    """Path of a tool, from .venv-chart or else from PATH."""
    found = shutil.which(name, path=str(TOOLS)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: make chart-tools")
    return found


def debian_tool(name):
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: apt-get install prometheus")
    return found


def run(command, **options):
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, **options)


def shape_values(shape):
    return yaml.safe_load((CHART / "ci" / f"{shape}-values.yaml").read_text(encoding="utf-8"))


def merged(values, changes):
    """`values` with `changes` laid over it, as Helm does it."""
    result = dict(values)
    for name, value in changes.items():
        both = isinstance(value, dict) and isinstance(result.get(name), dict)
        result[name] = merged(result[name], value) if both else value
    return result


def template(values, *, version=KUBERNETES[0], apis=(), chart=CHART, release="release"):
    """`helm template` with these values: the finished process."""
    return _rendered(json.dumps(values), version, tuple(apis), chart, release)


@functools.cache
def _rendered(values, version, apis, chart, release):
    command = [tool("helm"), "template", release, chart, "--namespace", "ns", "--kube-version", f"{version}.0"]
    for api in apis:
        command += ["--api-versions", api]
    return run([*command, "--values", "-"], input=values)


def objects(values, **options):
    """The objects that the values make."""
    done = template(values, **options)
    assert done.returncode == 0, done.stderr
    return [item for item in yaml.load_all(done.stdout, Loader=LOADER) if item]


def refused(values, **options):
    """What Helm says about values that it refuses."""
    done = template(values, **options)
    assert done.returncode != 0, "the values were taken"
    return re.sub(r"\s+", " ", done.stderr)


def one(found, kind):
    (item,) = [item for item in found if item["kind"] == kind]
    return item


def pods(found):
    """Pod templates by the name of their object."""
    return {item["metadata"]["name"]: item["spec"]["template"] for item in found if "template" in item.get("spec", {})}


def containers(pod):
    return {item["name"]: item for item in pod["spec"].get("initContainers", []) + pod["spec"]["containers"]}


def schema_complaints(found, version, path):
    """What Kubernetes' own schemas say against the objects; kinds that it does not know are left out."""
    known = [item for item in found if not item["apiVersion"].startswith("monitoring.coreos.com/")]
    path.write_text(yaml.safe_dump_all(known), encoding="utf-8")
    done = run([tool("kubernetes-validate"), "-k", version, "--strict", path])
    passed = done.stdout.count(" passed for resource ") + done.stderr.count(" passed for resource ")
    assert passed or done.returncode, "nothing was looked at"
    return [] if done.returncode == 0 and passed == len(known) else [done.stdout + done.stderr]


def security_complaints(found, level="restricted"):
    """What the Pod Security admission says against the pods."""
    items = [{"name": name, "metadata": pod["metadata"], "spec": pod["spec"]} for name, pod in pods(found).items()]
    assert items, "no pod"
    done = run([tool("podsecurity"), "-level", level], input=json.dumps(items))
    assert done.returncode in {0, 1}, done.stderr
    return done.stdout.splitlines()
