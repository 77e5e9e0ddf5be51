"""Makes the chart's README.md of its values.yaml.

    python helm/tools/readme.py            # writes README.md
    python helm/tools/readme.py --check    # exit code 1 if it is not what values.yaml gives

A value's text is the comment `# -- ...` above it.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parent.parent / "drafter-service"
COMMENT = re.compile(r"^( *)# -- (.*)$")
KEY = re.compile(r"^( *)([A-Za-z_]+):")

HEAD = """# drafter-service

The drafting half of speculative decoding, beside a target on a GPU node. This page is made of `values.yaml` by
`python helm/tools/readme.py`.

```
helm install drafter helm/drafter-service \\
  --set model.volume.persistentVolumeClaim.claimName=models --set model.head=head --set model.target=target \\
  --set config.kvBytes=4GiB --set target.image=registry.example/target:1.0 \\
  --set 'target.ports[0].name=http,target.ports[0].containerPort=8000'
```

| shape | for | guide |
|---|---|---|
| `sidecar` | the drafter in the target's pod, on its GPU or a second one | [docs/sidecar.md](docs/sidecar.md) |
| `paired` | two Deployments on one GPU or two, rolled out by themselves | [docs/paired.md](docs/paired.md) |
| `node` | one drafter a node, several targets | [docs/node.md](docs/node.md) |
| `deployment` | a CPU or several replicas, over TCP | [docs/deployment.md](docs/deployment.md) |
| `library` | templates for a pod of your own chart | [docs/sidecar.md](docs/sidecar.md#in-a-pod-of-your-own) |

[Which GPU for the drafter](docs/gpus.md) · [What fails and what is said then](docs/failures.md) ·
[Metrics, alerts, dashboard, traces](docs/watching.md) · [Capacity](docs/capacity.md) ·
[Upgrade and rollback](docs/upgrades.md)

Kubernetes 1.29 or newer; `gpu.mode: dra` needs 1.34 (`resource.k8s.io/v1`) and a DRA driver. No cluster has run this
chart yet: it is held to the schemas of Kubernetes 1.34 and 1.36 and, where a shape promises it, to the Pod Security
Standard *restricted*. `helm template` asks no cluster and takes the Kubernetes that helm was built for: with an older
helm say `--kube-version 1.34.0`.

## Values

Where a `config` value is `null`, the service's own default counts: `drafter-service serve --help` tells it, and what
the flag does.

| value | default | |
|---|---|---|
"""


def texts(source: str) -> dict[tuple[str, ...], str]:
    """The text of every value that has one, by its path."""
    found: dict[tuple[str, ...], str] = {}
    path: list[str] = []
    text: str | None = None
    for line in source.splitlines():
        if (comment := COMMENT.match(line)) is not None:
            text = comment[2]
        elif (key := KEY.match(line)) is not None:
            path[len(key[1]) // 2 :] = [key[2]]
            if text is not None:
                found[tuple(path)] = text
            text = None
    return found


def value_at(values: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        values = values[name]
    return values


def page() -> str:
    source = (CHART / "values.yaml").read_text(encoding="utf-8")
    values = yaml.safe_load(source)
    rows = []
    for path, text in texts(source).items():
        default = json.dumps(value_at(values, path), ensure_ascii=False)
        rows.append(f"| `{'.'.join(path)}` | `{default}` | {text.replace('|', chr(92) + '|')} |")
    return HEAD + "\n".join(rows) + "\n"


def main() -> int:
    target = CHART / "README.md"
    if "--check" in sys.argv[1:]:
        return 0 if target.read_text(encoding="utf-8") == page() else 1
    target.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
