{{/* What the schema cannot say: values that do not go together. Every line says what to do. */}}
{{- define "drafter-service.check" -}}
{{- $values := .Values -}}
{{- if not $values.model.volume -}}
{{- required "model.volume is required: the volume that holds the checkpoints, for example model.volume.persistentVolumeClaim.claimName=models" nil -}}
{{- end -}}
{{- if not $values.model.head -}}
{{- required "model.head is required: the directory of the head's checkpoint, below model.mountPath" nil -}}
{{- end -}}
{{- if and (eq $values.shape "sidecar") (not $values.target.image) -}}
{{- required "target.image is required for shape sidecar: the model server that the drafter stands beside. Choose shape library to put the drafter into a pod of your own" nil -}}
{{- end -}}
{{- if and (ne $values.gpu.mode "none") (not $values.config.kvBytes) -}}
{{- required "config.kvBytes is required on a GPU, for example 4GiB: the target's memory is not ours to guess from" nil -}}
{{- end -}}
{{- if and $values.tcp.enabled (not $values.tcp.insecure) (not $values.tcp.tlsSecret) -}}
{{- required "tcp.tlsSecret is required with tcp.enabled: a Secret with tls.crt, tls.key and ca.crt. Or say tcp.insecure=true" nil -}}
{{- end -}}
{{- if and $values.tcp.insecure $values.tcp.tlsSecret -}}
{{- fail "tcp.insecure and tcp.tlsSecret are both given: which is meant?" -}}
{{- end -}}
{{- if and (eq $values.shape "deployment") (not $values.tcp.enabled) -}}
{{- required "tcp.enabled=true is required for shape deployment: its targets are in other pods" nil -}}
{{- end -}}
{{- if and $values.gpu.mps.enabled (ne $values.gpu.mode "dra") -}}
{{- fail (printf "gpu.mps.enabled needs gpu.mode dra, and it is %s: elsewhere MPS is set up by whoever runs the node" $values.gpu.mode) -}}
{{- end -}}
{{- if and (eq $values.gpu.mode "dra") (semverCompare "<1.34.0-0" .Capabilities.KubeVersion.Version) -}}
{{- fail (printf "gpu.mode dra needs resource.k8s.io/v1, which Kubernetes has from 1.34 on, and this is %s. Use devicePlugin" .Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- if and (eq $values.shape "node") (eq $values.gpu.mode "dra") -}}
{{- fail "shape node cannot have gpu.mode dra: the targets' pods have claims of their own, and a claim of the drafter's would take a second GPU. Use visible, devicePlugin or none" -}}
{{- end -}}
{{- if and (eq $values.shape "paired") (ne $values.gpu.mode "dra") (not $values.tcp.enabled) (not $values.nodeSelector) (not $values.affinity) -}}
{{- fail "shape paired without gpu.mode dra: no claim brings the two pods to one node, where the socket is. Say nodeSelector or affinity, or tcp.enabled" -}}
{{- end -}}
{{- if and (eq $values.gpu.mode "visible") (not $values.gpu.runtimeClassName) -}}
{{- required "gpu.runtimeClassName is required with gpu.mode visible, usually nvidia" nil -}}
{{- end -}}
{{- if and $values.gpu.dra.existingClaim (ne $values.shape "paired") -}}
{{- fail (printf "gpu.dra.existingClaim is for shape paired, and it is %s: pods of other shapes get claims of their own" $values.shape) -}}
{{- end -}}
{{- if and $values.autoscaling.enabled (ne $values.shape "deployment") -}}
{{- fail (printf "autoscaling.enabled is for shape deployment, and it is %s" $values.shape) -}}
{{- end -}}
{{- end -}}
