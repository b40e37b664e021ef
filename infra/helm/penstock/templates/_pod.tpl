{{/* Parts that all pods share. */}}

{{- define "penstock.pod.security" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "penstock.container.security" -}}
runAsNonRoot: true
runAsUser: 10001
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* Checks and renders the environment in values. Takes {given: list, taken: YAML of the variables that the chart sets, who}. */}}
{{- define "penstock.env.given" -}}
{{- $who := .who -}}
{{- $taken := dict -}}
{{- range fromYamlArray .taken -}}
{{- $_ := set $taken .name true -}}
{{- end -}}
{{- range .given -}}
{{- if hasKey $taken .name -}}
{{- fail (printf "%s: extraEnv has %s twice, or the chart sets it: give it once, by its own value where it has one" $who .name) -}}
{{- end -}}
{{- $_ := set $taken .name true -}}
{{- if and (hasKey . "value") (regexMatch "(SECRETS?|PASSWORD|TOKEN|KEY|_POSTGRES|_POSTGRES_SESSION|CREDENTIALS)$" .name) -}}
{{- fail (printf "%s: extraEnv %s has a value: give valueFrom.secretKeyRef, since values are kept readable with the release" $who .name) -}}
{{- end -}}
{{- end -}}
{{- with .given -}}
{{- toYaml . -}}
{{- end -}}
{{- end -}}

{{/* Scheduling of a pod. Takes {root, component, pod}; pod is merged with `defaults`. */}}
{{- define "penstock.pod.placement" -}}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .pod.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .pod.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .pod.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .pod.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "penstock.pod.spread" -}}
{{- $selector := include "penstock.selector" . -}}
{{- with .root.Values.topologySpreadConstraints }}
topologySpreadConstraints:
{{- range . }}
  - {{- toYaml . | nindent 4 }}
    # Counts only pods of the same revision, or a rolling update would place new pods by the old ones.
    matchLabelKeys: [pod-template-hash]
    labelSelector:
      matchLabels: {{- $selector | nindent 8 }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Volumes and mounts of connections. Takes {kafka: sources, postgres: sources, objects: bool, topics: config map, root, tmpSize}. */}}
{{- define "penstock.volumes" -}}
- name: tmp
  emptyDir: {sizeLimit: {{ .tmpSize }}}
{{- with .kafka }}
- name: kafka
  projected:
    defaultMode: 0440
    sources: {{- . | nindent 6 }}
{{- end }}
{{- with .postgres }}
- name: postgres
  projected:
    defaultMode: 0440
    sources: {{- . | nindent 6 }}
{{- end }}
{{- if and .objects .root.Values.objects.existingClaim }}
- name: objects
  persistentVolumeClaim: {claimName: {{ .root.Values.objects.existingClaim }}}
{{- end }}
{{- with .topics }}
- name: topics
  configMap: {name: {{ . }}}
{{- end }}
{{- with .secretFiles }}
- name: callback-secrets
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- end -}}

{{- define "penstock.mounts" -}}
- {name: tmp, mountPath: /tmp}
{{- if .kafka }}
- {name: kafka, mountPath: /etc/penstock/kafka, readOnly: true}
{{- end }}
{{- if .postgres }}
- {name: postgres, mountPath: /etc/penstock/postgres, readOnly: true}
{{- end }}
{{- if and .objects .root.Values.objects.existingClaim }}
- {name: objects, mountPath: {{ trimPrefix "file://" .root.Values.objects.url | quote }}}
{{- end }}
{{- if .topics }}
- {name: topics, mountPath: /etc/penstock/topics, readOnly: true}
{{- end }}
{{- if .secretFiles }}
- {name: callback-secrets, mountPath: /etc/penstock/callback-secrets, readOnly: true}
{{- end }}
{{- end -}}
