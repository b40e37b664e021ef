{{/* Names and labels. */}}

{{- define "penstock.fullname" -}}
{{- $name := .Values.nameOverride | default .Chart.Name -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 30 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 30 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 30 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "penstock.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{- define "penstock.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "penstock.fullname" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end -}}

{{/* Labels that select a component's pods. Takes {root, component}; without component they select all pods of the release. */}}
{{- define "penstock.selector" -}}
app.kubernetes.io/name: {{ .root.Values.nameOverride | default .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end -}}

{{- define "penstock.labels" -}}
{{ include "penstock.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* All services, as a JSON list of {component, objects, values}; every template iterates over it. A test writes the file from the code's table. */}}
{{- define "penstock.services" -}}
{{- $services := list -}}
{{- range required "files/services.json is missing from the chart" (.Files.Get "files/services.json") | fromJsonArray -}}
{{- $services = append $services (dict "component" .component "objects" .objects "values" (index $.Values .values)) -}}
{{- end -}}
{{- $services | toJson -}}
{{- end -}}

{{/* The names by which clients call the gateway: those of its Service, Ingress and HTTPRoute, and the values'. */}}
{{- define "penstock.gateway.hosts" -}}
{{- $service := printf "%s-gateway" (include "penstock.fullname" .) -}}
{{- $inside := printf "%s.%s" $service .Release.Namespace -}}
{{- $hosts := list $service $inside (printf "%s.svc" $inside) (printf "%s.svc.cluster.local" $inside) -}}
{{- with .Values.gateway -}}
{{- if .ingress.enabled -}}{{- $hosts = concat $hosts .ingress.hosts -}}{{- end -}}
{{- if .httpRoute.enabled -}}{{- $hosts = concat $hosts .httpRoute.hostnames -}}{{- end -}}
{{- $hosts = concat $hosts .allowedHosts -}}
{{- end -}}
{{- $hosts | uniq | join "," -}}
{{- end -}}
