{{/* The drafter's container, without restartPolicy. */}}
{{- define "drafter-service.container" -}}
{{- $values := .Values -}}
name: drafter
image: {{ include "drafter-service.image" . | quote }}
imagePullPolicy: {{ $values.image.pullPolicy }}
args: [serve]
env:
  {{- include "drafter-service.env" . | nindent 2 }}
  {{- with include "drafter-service.deviceOrder" . }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- with $values.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with trim (include "drafter-service.ports" .) }}
ports:
  {{- . | nindent 2 }}
{{- end }}
startupProbe:
  {{- include "drafter-service.probe" (list . "") | nindent 2 }}
  {{- $start := ternary 2 10 (eq $values.probes.kind "grpc") }}
  periodSeconds: {{ $start }}
  failureThreshold: {{ max 1 (div $values.probes.startupSeconds $start) }}
{{- /* Beside a target there is none: a pod whose drafter drains or fails answers all the same, without drafts. */}}
{{- if not (has $values.shape (list "sidecar" "library")) }}
readinessProbe:
  {{- include "drafter-service.probe" (list . "") | nindent 2 }}
  periodSeconds: {{ ternary $values.probes.periodSeconds (max $values.probes.periodSeconds 15) (eq $values.probes.kind "grpc") }}
  failureThreshold: 1
{{- end }}
livenessProbe:
  {{- include "drafter-service.probe" (list . "specdraft.live") | nindent 2 }}
  periodSeconds: {{ ternary $values.probes.periodSeconds (max $values.probes.periodSeconds 15) (eq $values.probes.kind "grpc") }}
  failureThreshold: 3
resources:
  {{- include "drafter-service.resources" . | nindent 2 }}
securityContext:
  {{- include "drafter-service.containerSecurity" true | nindent 2 }}
volumeMounts:
  - {name: models, mountPath: {{ $values.model.mountPath | quote }}, readOnly: true}
  - {name: sockets, mountPath: {{ $values.socket.directory | quote }}}
  - {name: kernel-cache, mountPath: /var/cache/specdraft}
  - {name: scratch, mountPath: /tmp}
  {{- if and $values.tcp.enabled $values.tcp.tlsSecret }}
  - {name: tls, mountPath: /etc/specdraft/tls, readOnly: true}
  {{- end }}
  {{- with $values.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* Settings by their environment variables: those that the chart decides, then those of `config`. */}}
{{- define "drafter-service.env" -}}
{{- $values := .Values -}}
{{- $models := trimSuffix "/" $values.model.mountPath -}}
- {name: SPECDRAFT_CHECKPOINT, value: {{ printf "%s/%s" $models $values.model.head | quote }}}
{{- with $values.model.target }}
- {name: SPECDRAFT_TARGET_CHECKPOINT, value: {{ printf "%s/%s" $models . | quote }}}
{{- end }}
- {name: SPECDRAFT_SOCKET, value: {{ include "drafter-service.socketPath" . | quote }}}
- {name: SPECDRAFT_PROBE_HOST, value: {{ $values.listenHost | quote }}}
- {name: SPECDRAFT_METRICS_PORT, value: {{ ternary (toString $values.metrics.port) "off" $values.metrics.enabled | quote }}}
- {name: SPECDRAFT_HEALTH_PORT, value: {{ ternary (toString $values.probes.port) "off" (eq $values.probes.kind "grpc") | quote }}}
{{- if $values.tcp.enabled }}
- {name: SPECDRAFT_LISTEN, value: {{ printf "%s:%v" (ternary "[::]" $values.listenHost (eq $values.listenHost "::")) $values.tcp.port | quote }}}
{{- if $values.tcp.insecure }}
- {name: SPECDRAFT_INSECURE, value: "true"}
{{- else }}
- {name: SPECDRAFT_TLS_CERT, value: /etc/specdraft/tls/tls.crt}
- {name: SPECDRAFT_TLS_KEY, value: /etc/specdraft/tls/tls.key}
- {name: SPECDRAFT_TLS_CLIENT_CA, value: /etc/specdraft/tls/ca.crt}
{{- end }}
{{- end }}
{{- range $name, $value := $values.config }}
{{- if not (kindIs "invalid" $value) }}
- {name: SPECDRAFT_{{ snakecase $name | upper }}, value: {{ include "drafter-service.plain" $value | quote }}}
{{- end }}
{{- end }}
{{- if $values.tracing.enabled }}
- {name: SPECDRAFT_TRACING, value: "true"}
{{- with $values.tracing.endpoint }}
- {name: OTEL_EXPORTER_OTLP_ENDPOINT, value: {{ . | quote }}}
{{- end }}
{{- end }}
{{- if eq $values.gpu.mode "visible" }}
- {name: NVIDIA_VISIBLE_DEVICES, value: all}
{{- end }}
{{- end -}}

{{/* One order of the GPUs for drafter and target, so that cuda:1 is the same for both; empty where they see one GPU. */}}
{{- define "drafter-service.deviceOrder" -}}
{{- if or (gt (int64 .Values.gpu.dra.count) 1) (eq .Values.gpu.mode "visible") -}}
- {name: CUDA_DEVICE_ORDER, value: PCI_BUS_ID}
{{- end -}}
{{- end -}}

{{/* A scalar as people write it: Helm reads every number of a values file as a float. */}}
{{- define "drafter-service.plain" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) -}}
{{- int64 . -}}
{{- else -}}
{{- . -}}
{{- end -}}
{{- end -}}

{{- define "drafter-service.ports" -}}
{{- if .Values.metrics.enabled -}}
- {name: metrics, containerPort: {{ .Values.metrics.port }}}
{{ end -}}
{{- if eq .Values.probes.kind "grpc" -}}
- {name: health, containerPort: {{ .Values.probes.port }}}
{{ end -}}
{{- if .Values.tcp.enabled -}}
- {name: grpc, containerPort: {{ .Values.tcp.port }}}
{{ end -}}
{{- end -}}

{{/* One probe: [root, health service]. */}}
{{- define "drafter-service.probe" -}}
{{- $root := index . 0 -}}
{{- $service := index . 1 -}}
{{- if eq $root.Values.probes.kind "grpc" -}}
grpc:
  port: {{ $root.Values.probes.port }}
  {{- with $service }}
  service: {{ . }}
  {{- end }}
{{- else -}}
exec:
  command: [drafter-service, health, --target, {{ include "drafter-service.socketPath" $root | quote }}
    {{- with $service }}, --service, {{ . }}{{ end }}, --timeout-s, {{ $root.Values.probes.timeoutSeconds | toString | quote }}]
{{- end }}
timeoutSeconds: {{ add $root.Values.probes.timeoutSeconds (ternary 0 7 (eq $root.Values.probes.kind "grpc")) }}
{{- end -}}

{{- define "drafter-service.resources" -}}
{{- $resources := deepCopy .Values.resources -}}
{{- if eq .Values.gpu.mode "devicePlugin" -}}
{{- $limits := merge (dict .Values.gpu.devicePlugin.resourceName "1") (default dict $resources.limits) -}}
{{- $_ := set $resources "limits" $limits -}}
{{- end -}}
{{- if eq .Values.gpu.mode "dra" -}}
{{- $_ := set $resources "claims" (list (dict "name" "gpu")) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* securityContext of a container; the argument says whether its root file system is read-only. */}}
{{- define "drafter-service.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: {{ . }}
runAsNonRoot: true
capabilities: {drop: [ALL]}
seccompProfile: {type: RuntimeDefault}
{{- end -}}
