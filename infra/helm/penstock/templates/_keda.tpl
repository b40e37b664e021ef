{{/*
Scales a worker by the lag of its type's consumer group on the ready topic. Takes {root, worker, kafka, component}.

Ready tasks wait in PostgreSQL, and Kafka has only a window of them: at least taskSync.windowFloor records while more wait.
When workers cannot keep up, the lag stays near this floor, regardless of the backlog. The default threshold therefore makes
this lag request maxReplicas.
*/}}
{{- define "penstock.worker.keda" }}
{{- $worker := .worker }}
{{- $name := printf "%s-%s" (include "penstock.fullname" .root) .component }}
{{- $keda := $worker.keda }}
{{- if $worker.viaGateway }}
{{- fail (printf "%s: keda needs a worker that reads Kafka: gateways fetch ahead, so with viaGateway the lag does not show the backlog" .component) }}
{{- end }}
{{- if not (hasKey $worker "pool") }}
{{- fail (printf "%s: keda needs pool (and backlog): a worker claims that many tasks ahead, and claimed tasks are not lag" .component) }}
{{- end }}
{{- $most := $keda.maxReplicas | default 8 | int }}
{{- $least := hasKey $keda "minReplicas" | ternary $keda.minReplicas 1 | int }}
{{- if gt $least $most }}
{{- fail (printf "%s: keda.minReplicas=%d is above keda.maxReplicas=%d" .component $least $most) }}
{{- end }}
{{- $threshold := $keda.lagThreshold | default (max 1 (div (int .root.Values.taskSync.windowFloor) $most)) | int }}
{{- $sasl := .kafka.sasl }}
{{- $tls := hasSuffix "SSL" .kafka.protocol }}
{{- $authenticated := or $sasl.mechanism .kafka.tls.caSecret.name .kafka.tls.clientSecret.name }}
---
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata:
  name: {{ $name }}
  namespace: {{ .root.Release.Namespace }}
  labels: {{- include "penstock.labels" (dict "root" .root "component" .component) | nindent 4 }}
spec:
  scaleTargetRef: {name: {{ $name }}}
  minReplicaCount: {{ $least }}
  maxReplicaCount: {{ $most }}
  pollingInterval: {{ $keda.pollingInterval | default 15 }}
  cooldownPeriod: {{ $keda.cooldownPeriod | default 300 }}
  advanced:
    horizontalPodAutoscalerConfig:
      behavior:
        scaleDown:
          # Claimed tasks are not lag, so scaling down early would interrupt them.
          stabilizationWindowSeconds: {{ $keda.scaleDownSeconds | default 300 }}
          policies: [{type: Pods, value: 1, periodSeconds: 60}]
  triggers:
    - type: kafka
      metadata:
        bootstrapServers: {{ .kafka.bootstrapServers | quote }}
        consumerGroup: {{ printf "%sworkers.%s" .root.Values.prefix $worker.type | quote }}
        topic: {{ printf "%sready.%s" .root.Values.prefix $worker.type | quote }}
        lagThreshold: {{ $threshold | quote }}
        activationLagThreshold: "0"
        # As workers do: a group without an offset starts at the oldest record.
        offsetResetPolicy: earliest
        allowIdleConsumers: "false"
        {{- if $sasl.mechanism }}
        sasl: {{ get (dict "PLAIN" "plaintext" "SCRAM-SHA-256" "scram_sha256" "SCRAM-SHA-512" "scram_sha512" "OAUTHBEARER" "oauthbearer") $sasl.mechanism }}
        {{- if eq $sasl.mechanism "OAUTHBEARER" }}
        oauthTokenEndpointUri: {{ $sasl.oauth.tokenUrl | quote }}
        {{- with $sasl.oauth.scope }}
        scopes: {{ splitList " " . | compact | join "," | quote }}
        {{- end }}
        {{- end }}
        {{- end }}
        {{- if $tls }}
        tls: enable
        {{- end }}
      {{- if $authenticated }}
      authenticationRef: {name: {{ $name }}}
      {{- end }}
    {{- with $keda.extraTriggers }}{{ toYaml . | nindent 4 }}{{ end }}
{{- if $authenticated }}
---
apiVersion: keda.sh/v1alpha1
kind: TriggerAuthentication
metadata:
  name: {{ $name }}
  namespace: {{ .root.Release.Namespace }}
  labels: {{- include "penstock.labels" (dict "root" .root "component" .component) | nindent 4 }}
spec:
  {{- if and $sasl.mechanism (not $sasl.userSecret.name) }}
  env:
    # From the environment of the scaled container: a user name need not be a secret.
    - {parameter: username, name: {{ eq $sasl.mechanism "OAUTHBEARER" | ternary "PENSTOCK_KAFKA_CLIENT_ID" "PENSTOCK_KAFKA_USER" }}, containerName: worker}
  {{- end }}
  secretTargetRef:
    {{- if eq $sasl.mechanism "OAUTHBEARER" }}
    - {parameter: password, name: {{ $sasl.oauth.clientSecret.name }}, key: {{ $sasl.oauth.clientSecret.key }}}
    {{- else if $sasl.mechanism }}
    {{- with $sasl.userSecret }}{{ if .name }}
    - {parameter: username, name: {{ .name }}, key: {{ .key }}}
    {{- end }}{{ end }}
    - {parameter: password, name: {{ $sasl.passwordSecret.name }}, key: {{ $sasl.passwordSecret.key }}}
    {{- end }}
    {{- with .kafka.tls.caSecret }}{{ if .name }}
    - {parameter: ca, name: {{ .name }}, key: {{ .key }}}
    {{- end }}{{ end }}
    {{- with .kafka.tls.clientSecret }}{{ if .name }}
    - {parameter: cert, name: {{ .name }}, key: {{ .certKey }}}
    - {parameter: key, name: {{ .name }}, key: {{ .keyKey }}}
    {{- end }}{{ end }}
{{- end }}
{{- end }}
