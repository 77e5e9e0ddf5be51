{{- define "drafter-service.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "drafter-service.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Labels that select the drafter's pods. */}}
{{- define "drafter-service.selector" -}}
app.kubernetes.io/name: {{ include "drafter-service.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: {{ ternary "target-with-drafter" "drafter" (eq .Values.shape "sidecar") }}
{{- end -}}

{{- define "drafter-service.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/name: {{ include "drafter-service.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "drafter-service.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "drafter-service.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "drafter-service.image" -}}
{{- $image := .Values.image -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $image.repository $image.digest -}}
{{- else -}}
{{- $flavour := ternary "cpu" "cuda" (eq .Values.gpu.mode "none") -}}
{{- printf "%s:%s" $image.repository (default (printf "%s-%s" .Chart.AppVersion $flavour) $image.tag) -}}
{{- end -}}
{{- end -}}

{{/* Name of the ResourceClaim or ResourceClaimTemplate. */}}
{{- define "drafter-service.claim" -}}
{{- default (printf "%s-gpu" (include "drafter-service.fullname" .)) .Values.gpu.dra.existingClaim -}}
{{- end -}}

{{- define "drafter-service.socketPath" -}}
{{- printf "%s/specdraft.sock" (trimSuffix "/" .Values.socket.directory) -}}
{{- end -}}
