"""Values that cannot work are refused in words that help."""

import pytest

from chart import DEVICE_PLUGIN, SCALED, TWO_GPUS, merged, objects, refused, shape_values

LIMIT = {"resources": {"limits": {"nvidia.com/gpu": 1}}}
SLICE = {"resources": {"requests": {"nvidia.com/mig-1g.10gb": 1}}}
VISIBLE = {"gpu": {"mode": "visible", "runtimeClassName": "nvidia"}}
SLICES = {"gpu": {"dra": {"deviceClassName": "mig.nvidia.com"}}}
HIDDEN = [{"name": "CUDA_VISIBLE_DEVICES", "value": "0"}]
THIRD = {"config": {"device": "cuda:2"}}
SECOND = {"config": {"device": "cuda:1"}}
ALONE = {"gpu": {"mode": "dra", "dra": {"count": 2}}, "config": {"device": "cuda:1", "kvBytes": "4GiB"}}

# What Helm has to say about it, part by part.
WRONG = {
    "no volume": ("sidecar", {"model": {"volume": None}}, ["model.volume is required"]),
    "a volume with a name": ("sidecar", {"model": {"volume": {"name": "x"}}}, ["model.volume has a name"]),
    "a Service named by a number": ("deployment", {"fullnameOverride": "1a"}, ["begins with a letter", "1a"]),
    "no head": ("sidecar", {"model": {"head": ""}}, ["model.head is required"]),
    "no target": ("sidecar", {"target": {"image": ""}}, ["target.image is required for shape sidecar", "library"]),
    "no KV budget on a GPU": ("sidecar", {"config": {"kvBytes": None}}, ["config.kvBytes is required", "4GiB"]),
    "TCP without TLS": ("deployment", {"tcp": {"tlsSecret": ""}}, ["tcp.tlsSecret is required", "insecure"]),
    "TLS or not": ("deployment", {"tcp": {"insecure": True}}, ["which is meant"]),
    "a deployment without TCP": ("deployment", {"tcp": {"enabled": False}}, ["tcp.enabled=true is required"]),
    "MPS without DRA": ("sidecar", merged(DEVICE_PLUGIN, {"gpu": {"mps": {"enabled": True}}}), ["mps", "mode dra"]),
    "a claim for each node": ("node", {"gpu": {"mode": "dra"}}, ["shape node", "second GPU"]),
    "visible without a runtime": ("node", {"gpu": {"runtimeClassName": ""}}, ["gpu.runtimeClassName is required"]),
    "a shared claim elsewhere": ("sidecar", {"gpu": {"dra": {"existingClaim": "x"}}}, ["existingClaim", "paired"]),
    "several GPUs without a claim": (TWO_GPUS, DEVICE_PLUGIN, ["gpu.dra.count is 2", "devicePlugin", "no claim"]),
    "several GPUs of all": (TWO_GPUS, VISIBLE, ["gpu.dra.count is 2", "visible", "no claim"]),
    "several GPUs on each node": ("node", {"gpu": {"mode": "dra", "dra": {"count": 2}}}, ["shape node"]),
    "several GPUs for one": ("deployment", ALONE, ["gpu.dra.count is 2", "shape deployment", "sidecar"]),
    "several GPUs under MPS": (
        TWO_GPUS,
        {"gpu": {"mps": {"enabled": True}}},
        ["gpu.mps.enabled", "gpu.dra.count is 2"],
    ),
    "several slices": (TWO_GPUS, SLICES, ["gpu.dra.count is 2", "mig.nvidia.com", "whole GPUs"]),
    "which of two GPUs": (TWO_GPUS, {"config": {"device": None}}, ["config.device is auto", "usually cuda:1"]),
    "a CPU with two GPUs": (TWO_GPUS, {"config": {"device": "cpu"}}, ["config.device is cpu", "usually cuda:1"]),
    "the first GPU by no number": (TWO_GPUS, {"config": {"device": "cuda"}}, ["config.device is cuda,", "cuda:1"]),
    "a third of two GPUs": (TWO_GPUS, THIRD, ["config.device is cuda:2", "last GPU is cuda:1", "gpu.dra.count is 2"]),
    "a second of one GPU": ("sidecar", SECOND, ["config.device is cuda:1", "last GPU is cuda:0", "gpu.dra.count is 1"]),
    "a second of a claim at hand": ("paired", merged(SECOND, {"gpu": {"dra": {"existingClaim": "x"}}}), ["is cuda:1"]),
    "a second of the plugin's": ("sidecar", merged(SECOND, DEVICE_PLUGIN), ["config.device is cuda:1", "as cuda:0"]),
    "a GPU hidden from the target": (TWO_GPUS, {"target": {"env": HIDDEN}}, ["target.env has CUDA_VISIBLE_DEVICES"]),
    "a GPU hidden from the drafter": (TWO_GPUS, {"env": HIDDEN}, [": env has CUDA_VISIBLE_DEVICES", "see all GPUs"]),
    "one of all GPUs, hidden from the target": (
        "node",
        merged(SECOND, {"target": {"env": HIDDEN}}),
        ["target.env has CUDA_VISIBLE_DEVICES", "config.device is cuda:1 of the node's GPUs"],
    ),
    "one of all GPUs, hidden from the drafter": (
        "node",
        merged(SECOND, {"env": HIDDEN}),
        [": env has CUDA_VISIBLE_DEV"],
    ),
    "no GPU in the claim": ("sidecar", {"gpu": {"dra": {"count": 0}}}, ["/gpu/dra/count", "minimum"]),
    "no number of GPUs": ("sidecar", {"gpu": {"dra": {"count": None}}}, ["/gpu/dra", "missing property 'count'"]),
    "two nodes": ("paired", {"gpu": {"mode": "none"}}, ["one node", "nodeSelector"]),
    "scaling unseen": ("deployment", {"metrics": {"enabled": False}, **SCALED}, ["metrics.enabled", "measures"]),
    "scaling a sidecar": ("sidecar", SCALED, ["autoscaling.enabled", "deployment"]),
    "an unknown shape": ("sidecar", {"shape": "pod"}, ["/shape", "'sidecar', 'paired'"]),
    "an unknown value": ("sidecar", {"replica": 2}, ["'replica' not allowed"]),
    "an unknown setting": ("sidecar", {"config": {"max_drafts": 2}}, ["/config", "'max_drafts' not allowed"]),
    "a setting of the wrong kind": ("sidecar", {"config": {"maxDrafts": "many"}}, ["/config/maxDrafts", "integer"]),
    "a setting that is too small": ("sidecar", {"config": {"maxDrafts": 0}}, ["/config/maxDrafts", "minimum"]),
    "a quantity of Kubernetes'": ("sidecar", {"config": {"kvBytes": "4Gi"}}, ["/config/kvBytes", "4Gi", "GiB"]),
    "a socket path that is too long": ("sidecar", {"socket": {"directory": "/" + "d" * 90}}, ["/socket/directory"]),
    "root": ("sidecar", {"runAsUser": 0}, ["/runAsUser", "minimum"]),
    "a path out of the volume": ("sidecar", {"model": {"head": "/etc"}}, ["/model/head"]),
    "a claim and a limit": ("sidecar", {"target": LIMIT}, ["target.resources.limits has nvidia.com/gpu", "second GPU"]),
    "a claim and a slice": ("paired", SLICE, ["resources.requests has nvidia.com/mig-1g.10gb", "second GPU"]),
    "two listeners, one port": ("sidecar", {"metrics": {"port": 9465}}, ["metrics.port and probes.port are both 9465"]),
    "a port of the target's": ("sidecar", {"target": {"ports": [{"containerPort": 9464}]}}, ["target.ports", "9464"]),
    "less grace than drain": ("sidecar", {"terminationGracePeriodSeconds": 10}, ["config.drainS (20)", "killed"]),
    "a selecting label": ("sidecar", {"podLabels": {"app.kubernetes.io/component": "x"}}, ["podLabels has", "selects"]),
    "no way in": ("node", {"socket": {"hostPath": ""}}, ["empty socket.hostPath", "tcp.enabled"]),
    "no settings at all": ("sidecar", {"config": None}, ["missing property 'config'"]),
    "no mode": ("sidecar", {"gpu": {"mode": None}}, ["/gpu", "missing property 'mode'"]),
    "a name that is none": ("sidecar", {"nameOverride": "My_App"}, ["/nameOverride", "My_App"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_values_are_refused_in_words_that_help(name):
    shape, changes, words = WRONG[name]
    said = refused(merged(shape_values(shape), changes))
    assert [word for word in words if word not in said] == [], said


def test_dra_is_refused_where_kubernetes_has_no_v1_of_it():
    assert "1.34" in refused(shape_values("sidecar"), version="1.33")
    assert objects(merged(shape_values("sidecar"), DEVICE_PLUGIN), version="1.33")
