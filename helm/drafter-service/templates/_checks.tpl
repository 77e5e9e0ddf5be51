{{/* What the schema cannot say: values that do not go together. Every line says what to do. */}}
{{- define "drafter-service.check" -}}
{{- $values := .Values -}}
{{- if not $values.model.volume -}}
{{- required "model.volume is required: the volume that holds the checkpoints, for example model.volume.persistentVolumeClaim.claimName=models" nil -}}
{{- end -}}
{{- if hasKey $values.model.volume "name" -}}
{{- fail "model.volume has a name, and the chart gives it one: say its source alone, for example persistentVolumeClaim" -}}
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
{{- include "drafter-service.checkGpus" $values -}}
{{- if and $values.autoscaling.enabled (ne $values.shape "deployment") -}}
{{- fail (printf "autoscaling.enabled is for shape deployment, and it is %s" $values.shape) -}}
{{- end -}}
{{- if and $values.autoscaling.enabled (not $values.metrics.enabled) -}}
{{- fail "autoscaling.enabled needs metrics.enabled: it follows what the service measures" -}}
{{- end -}}
{{- if eq $values.gpu.mode "dra" -}}
{{- include "drafter-service.checkNoLimit" (list $values "resources" $values.resources) -}}
{{- include "drafter-service.checkNoLimit" (list $values "target.resources" $values.target.resources) -}}
{{- end -}}
{{- if and (has $values.shape (list "paired" "node")) (not $values.socket.hostPath) (not $values.tcp.enabled) -}}
{{- fail (printf "shape %s with an empty socket.hostPath: nobody could reach the drafter. Say tcp.enabled, or give the directory" $values.shape) -}}
{{- end -}}
{{- if and $values.tcp.enabled (has $values.shape (list "paired" "node" "deployment")) (not (regexMatch "^[a-z]" (include "drafter-service.fullname" .))) -}}
{{- fail (printf "a Service's name begins with a letter, and it would be %s: say fullnameOverride" (include "drafter-service.fullname" .)) -}}
{{- end -}}
{{- include "drafter-service.checkPorts" $values -}}
{{- include "drafter-service.checkLabels" $values -}}
{{- $drain := ternary 20 $values.config.drainS (kindIs "invalid" $values.config.drainS) -}}
{{- if not (kindIs "invalid" $values.terminationGracePeriodSeconds) -}}
{{- if lt (float64 $values.terminationGracePeriodSeconds) (float64 $drain) -}}
{{- fail (printf "terminationGracePeriodSeconds %d is less than config.drainS (%v): the service would be killed while it drains. Raise the one or lower the other" (int64 $values.terminationGracePeriodSeconds) $drain) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Several GPUs in the claim, and the one of them that is the drafter's. */}}
{{- define "drafter-service.checkGpus" -}}
{{- $count := int64 .gpu.dra.count -}}
{{- $device := default "auto" .config.device -}}
{{- if gt $count 1 -}}
{{- if ne .gpu.mode "dra" -}}
{{- fail (printf "gpu.dra.count is %d, and gpu.mode %s makes no claim. Use gpu.mode dra, or leave the count at 1" $count .gpu.mode) -}}
{{- end -}}
{{- if eq .shape "deployment" -}}
{{- fail (printf "gpu.dra.count is %d, and shape deployment has no target in the claim: the drafter uses one GPU. Use sidecar, paired or library, or count 1" $count) -}}
{{- end -}}
{{- if .gpu.mps.enabled -}}
{{- fail (printf "gpu.mps.enabled is for one GPU that drafter and target share, and gpu.dra.count is %d. Take one of the two" $count) -}}
{{- end -}}
{{- if hasPrefix "mig." .gpu.dra.deviceClassName -}}
{{- fail (printf "gpu.dra.count is %d, and of MIG slices (%s) a CUDA process sees one alone. Use whole GPUs, or count 1" $count .gpu.dra.deviceClassName) -}}
{{- end -}}
{{- if not (regexMatch "^cuda:[0-9]+$" $device) -}}
{{- fail (printf "config.device is %s, and gpu.dra.count is %d: say which GPU is the drafter's, usually cuda:%d, since targets take the first" $device $count (sub $count 1)) -}}
{{- end -}}
{{- include "drafter-service.checkSeen" (list . (printf "gpu.dra.count is %d" $count)) -}}
{{- end -}}
{{- $ordinal := int64 (default "0" (regexFind "[0-9]+$" $device)) -}}
{{- if and (eq .gpu.mode "visible") (gt $ordinal 0) -}}
{{- include "drafter-service.checkSeen" (list . (printf "config.device is %s of the node's GPUs" $device)) -}}
{{- end -}}
{{- if and (eq .gpu.mode "dra") (ge $ordinal $count) -}}
{{- fail (printf "config.device is %s, and the claim's last GPU is cuda:%d: gpu.dra.count is %d" $device (sub $count 1) $count) -}}
{{- end -}}
{{- if and (eq .gpu.mode "devicePlugin") (gt $ordinal 0) -}}
{{- fail (printf "config.device is %s, and gpu.mode devicePlugin gives the drafter one GPU, which it sees as cuda:0" $device) -}}
{{- end -}}
{{- end -}}

{{/* Nothing that hides one of several GPUs: [values, why there are several]. */}}
{{- define "drafter-service.checkSeen" -}}
{{- $values := index . 0 -}}
{{- $why := index . 1 -}}
{{- range $name, $env := dict "env" $values.env "target.env" $values.target.env -}}
{{- range $env -}}
{{- if eq .name "CUDA_VISIBLE_DEVICES" -}}
{{- fail (printf "%s has CUDA_VISIBLE_DEVICES, and %s: drafter and target have to see all GPUs, by the same ordinals. Take it out" $name $why) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* No GPU as an extended resource beside a claim: [values, name of the resources, resources]. */}}
{{- define "drafter-service.checkNoLimit" -}}
{{- $values := index . 0 -}}
{{- $name := index . 1 -}}
{{- range $part, $quantities := index . 2 -}}
{{- range $resource, $_ := $quantities -}}
{{- if or (eq $resource $values.gpu.devicePlugin.resourceName) (hasPrefix "nvidia.com/" $resource) -}}
{{- fail (printf "%s.%s has %s, and gpu.mode dra gives the container a claim: it would get a second GPU. Take it out, or use gpu.mode devicePlugin" $name $part $resource) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* One address for all listeners of the pod, and so a port for each. */}}
{{- define "drafter-service.checkPorts" -}}
{{- $taken := dict -}}
{{- $ports := list -}}
{{- if .metrics.enabled -}}{{- $ports = append $ports (list "metrics.port" .metrics.port) -}}{{- end -}}
{{- if eq .probes.kind "grpc" -}}{{- $ports = append $ports (list "probes.port" .probes.port) -}}{{- end -}}
{{- if .tcp.enabled -}}{{- $ports = append $ports (list "tcp.port" .tcp.port) -}}{{- end -}}
{{- if eq .shape "sidecar" -}}
{{- range .target.ports -}}
{{- if eq (default "TCP" .protocol) "TCP" -}}{{- $ports = append $ports (list "target.ports" .containerPort) -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- range $ports -}}
{{- $name := index . 0 -}}
{{- $port := toString (index . 1) -}}
{{- with get $taken $port -}}
{{- fail (printf "%s and %s are both %s: one pod has one address, and each listener needs a port of its own" . $name $port) -}}
{{- end -}}
{{- $_ := set $taken $port $name -}}
{{- end -}}
{{- end -}}

{{/* What selects the pods belongs to the chart. */}}
{{- define "drafter-service.checkLabels" -}}
{{- range $name := list "commonLabels" "podLabels" -}}
{{- range $label := list "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/component" -}}
{{- if hasKey (default dict (index $ $name)) $label -}}
{{- fail (printf "%s has %s, by which the chart selects its pods. Take another label, or nameOverride" $name $label) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
