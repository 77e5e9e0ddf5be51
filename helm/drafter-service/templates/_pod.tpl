{{/* The drafter as a native sidecar: an entry of initContainers. */}}
{{- define "drafter-service.sidecar" -}}
{{- include "drafter-service.check" . -}}
- restartPolicy: Always
  {{- include "drafter-service.container" . | nindent 2 }}
{{- end -}}

{{/* What a pod of the drafter needs beside containers: entries of volumes. */}}
{{- define "drafter-service.volumes" -}}
- name: models
  {{- with .Values.model.volume }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
- name: sockets
  {{- if include "drafter-service.onHost" . }}
  hostPath: {path: {{ .Values.socket.hostPath | quote }}, type: DirectoryOrCreate}
  {{- else }}
  emptyDir: {medium: Memory, sizeLimit: {{ .Values.socket.sizeLimit }}}
  {{- end }}
- name: kernel-cache
  emptyDir: {sizeLimit: {{ .Values.kernelCacheSizeLimit }}}
- name: scratch
  emptyDir: {sizeLimit: 256Mi}
{{- if and .Values.tcp.enabled .Values.tcp.tlsSecret }}
- name: tls
  secret: {secretName: {{ .Values.tcp.tlsSecret | quote }}, defaultMode: 288}
{{- end }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Entries of resourceClaims; empty where there are none. */}}
{{- define "drafter-service.claims" -}}
{{- if eq .Values.gpu.mode "dra" -}}
- name: gpu
  {{- if eq .Values.shape "paired" }}
  resourceClaimName: {{ include "drafter-service.claim" . | quote }}
  {{- else }}
  resourceClaimTemplateName: {{ include "drafter-service.claim" . | quote }}
  {{- end }}
{{- end -}}
{{- end -}}

{{/* Not empty where the sockets are in a directory of the host. */}}
{{- define "drafter-service.onHost" -}}
{{- if and (has .Values.shape (list "paired" "node")) .Values.socket.hostPath -}}
true
{{- end -}}
{{- end -}}

{{/* What the target's container mounts to reach the drafter: entries of volumeMounts. */}}
{{- define "drafter-service.targetMounts" -}}
- {name: sockets, mountPath: {{ .Values.socket.directory | quote }}}
{{- end -}}

{{- define "drafter-service.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ int64 .Values.runAsUser }}
runAsGroup: {{ int64 .Values.runAsGroup }}
fsGroup: {{ int64 .Values.runAsGroup }}
# Not file by file at each start: the volume of models is large.
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "drafter-service.gracePeriod" -}}
{{- if kindIs "invalid" .Values.terminationGracePeriodSeconds -}}
{{- $drain := ternary 20 .Values.config.drainS (kindIs "invalid" .Values.config.drainS) -}}
{{- add (int64 (ceil $drain)) 10 -}}
{{- else -}}
{{- int64 .Values.terminationGracePeriodSeconds -}}
{{- end -}}
{{- end -}}

{{/* All of a pod's spec but its containers. */}}
{{- define "drafter-service.podSpec" -}}
serviceAccountName: {{ include "drafter-service.serviceAccountName" . | quote }}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: {{ include "drafter-service.gracePeriod" . }}
shareProcessNamespace: {{ .Values.shareProcessNamespace }}
securityContext:
  {{- include "drafter-service.podSecurity" . | nindent 2 }}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.gpu.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- with include "drafter-service.claims" . }}
resourceClaims:
  {{- . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- $ofAGpu := list (dict "key" "nvidia.com/gpu" "operator" "Exists" "effect" "NoSchedule") }}
{{- with ternary (ternary list $ofAGpu (eq .Values.gpu.mode "none")) .Values.tolerations (kindIs "invalid" .Values.tolerations) }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
volumes:
  {{- include "drafter-service.volumes" . | nindent 2 }}
{{- end -}}

{{- define "drafter-service.podMetadata" -}}
labels:
  {{- include "drafter-service.labels" . | nindent 2 }}
  app.kubernetes.io/component: {{ ternary "target-with-drafter" "drafter" (eq .Values.shape "sidecar") }}
  {{- with .Values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .Values.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Metadata and spec of a pod with the drafter alone. */}}
{{- define "drafter-service.drafterPod" -}}
metadata:
  {{- include "drafter-service.podMetadata" . | nindent 2 }}
spec:
  {{- include "drafter-service.podSpec" . | nindent 2 }}
  containers:
    -
      {{- include "drafter-service.container" . | nindent 6 }}
{{- end -}}

{{/* The target's container. */}}
{{- define "drafter-service.targetContainer" -}}
{{- $target := .Values.target -}}
name: target
image: {{ $target.image | quote }}
imagePullPolicy: {{ $target.imagePullPolicy }}
{{- range $name := list "command" "args" "ports" "readinessProbe" "livenessProbe" "startupProbe" }}
{{- with index $target $name }}
{{ $name }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- /* In a pod of its own it has the socket by the host alone; otherwise it calls over TCP. */}}
{{- $hasSocket := or (ne .Values.shape "paired") (include "drafter-service.onHost" .) }}
{{- $order := include "drafter-service.deviceOrder" . }}
{{- if or $hasSocket $order $target.env }}
env:
  {{- if $hasSocket }}
  - {name: SPECDRAFT_SOCKET, value: {{ include "drafter-service.socketPath" . | quote }}}
  {{- end }}
  {{- with $order }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- with $target.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
{{- $resources := deepCopy $target.resources -}}
{{- if eq .Values.gpu.mode "dra" -}}
{{- $_ := set $resources "claims" (list (dict "name" "gpu")) -}}
{{- end }}
{{- with $resources }}
resources:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- include "drafter-service.containerSecurity" $target.readOnlyRootFilesystem | nindent 2 }}
volumeMounts:
  - {name: models, mountPath: {{ .Values.model.mountPath | quote }}, readOnly: true}
  {{- if $hasSocket }}
  {{- include "drafter-service.targetMounts" . | nindent 2 }}
  {{- end }}
  {{- with $target.volumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}
