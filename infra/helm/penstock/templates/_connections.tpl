{{/* Connections of a pod to Kafka, PostgreSQL and the object store: validation, environment and mounted secrets. */}}

{{/* The values of Kafka for one component, as JSON. Takes {root, who, kafka}; kafka overrides the release's values. */}}
{{- define "penstock.kafka" -}}
{{- $kafka := mergeOverwrite (deepCopy .root.Values.kafka) (deepCopy (.kafka | default dict)) -}}
{{- if not $kafka.bootstrapServers -}}
{{- fail "kafka.bootstrapServers is empty: give the brokers, as kafka-bootstrap.kafka.svc:9093" -}}
{{- end -}}
{{- $sasl := $kafka.sasl -}}
{{- $given := or $sasl.mechanism $sasl.user $sasl.userSecret.name $sasl.passwordSecret.name $sasl.oauth.tokenUrl -}}
{{- if hasPrefix "SASL_" $kafka.protocol -}}
{{- if not $sasl.mechanism -}}
{{- fail (printf "%s: kafka.protocol is %s, so kafka.sasl.mechanism must be given" .who $kafka.protocol) -}}
{{- else if eq $sasl.mechanism "OAUTHBEARER" -}}
{{- if not (and $sasl.oauth.tokenUrl $sasl.oauth.clientId $sasl.oauth.clientSecret.name) -}}
{{- fail (printf "%s: kafka.sasl.mechanism OAUTHBEARER needs kafka.sasl.oauth.tokenUrl, .clientId and .clientSecret.name" .who) -}}
{{- end -}}
{{- else -}}
{{- if and $sasl.user $sasl.userSecret.name -}}
{{- fail (printf "%s: kafka.sasl.user and kafka.sasl.userSecret.name exclude each other: give one" .who) -}}
{{- end -}}
{{- if not (and (or $sasl.user $sasl.userSecret.name) $sasl.passwordSecret.name) -}}
{{- fail (printf "%s: kafka.sasl.mechanism %s needs kafka.sasl.passwordSecret.name, and kafka.sasl.user or kafka.sasl.userSecret.name" .who $sasl.mechanism) -}}
{{- end -}}
{{- end -}}
{{- else if $given -}}
{{- fail (printf "%s: kafka.sasl is given but kafka.protocol is %s: make it SASL_SSL or SASL_PLAINTEXT" .who $kafka.protocol) -}}
{{- end -}}
{{- if and (not (hasSuffix "SSL" $kafka.protocol)) (or $kafka.tls.caSecret.name $kafka.tls.clientSecret.name) -}}
{{- fail (printf "%s: kafka.tls is given but kafka.protocol is %s: make it SSL or SASL_SSL" .who $kafka.protocol) -}}
{{- end -}}
{{- /* Some clients reject spaces between servers. */ -}}
{{- set $kafka "bootstrapServers" (nospace $kafka.bootstrapServers) | toJson | replace "{service}" .who -}}
{{- end -}}

{{/* Fails when two services have the same credentials. Takes root. */}}
{{- define "penstock.credentials.apart" -}}
{{- $root := . -}}
{{- if not .Values.sharedCredentials -}}
{{- $owners := dict -}}
{{- range include "penstock.services" . | fromJsonArray -}}
{{- $component := .component -}}
{{- $kafka := include "penstock.kafka" (dict "root" $root "who" $component "kafka" .values.kafka) | fromJson -}}
{{- $postgres := include "penstock.postgres" (dict "root" $root "who" $component "postgres" .values.postgres) | fromJson -}}
{{- $used := list (printf "postgres.url.name=%s, key %s" $postgres.url.name $postgres.url.key) -}}
{{- with $kafka.sasl -}}
{{- if eq .mechanism "OAUTHBEARER" -}}
{{- $used = append $used (printf "kafka.sasl.oauth.clientId=%s" .oauth.clientId) -}}
{{- else if .mechanism -}}
{{- $used = append $used (ternary (printf "kafka.sasl.user=%s" .user) (printf "kafka.sasl.userSecret.name=%s, key %s" .userSecret.name .userSecret.key) (ne .user "")) -}}
{{- end -}}
{{- end -}}
{{- with $kafka.tls.clientSecret -}}{{- if .name -}}
{{- $used = append $used (printf "kafka.tls.clientSecret.name=%s, key %s" .name .keyKey) -}}
{{- end -}}{{- end -}}
{{- range $used -}}
{{- if hasKey $owners . -}}
{{- fail (printf "%s and %s share their credentials (%s): write {service} in the name, which stands for the service, or give each its own; sharedCredentials=true permits sharing" (get $owners .) $component .) -}}
{{- end -}}
{{- $_ := set $owners . $component -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The values of PostgreSQL for one component, as JSON. Takes {root, who, postgres}. */}}
{{- define "penstock.postgres" -}}
{{- $postgres := mergeOverwrite (deepCopy .root.Values.postgres) (deepCopy (.postgres | default dict)) -}}
{{- if not $postgres.url.name -}}
{{- fail (printf "%s: postgres.url.name is empty: name the secret that has the connection URL (CloudNativePG: <cluster>-app, key uri)" .who) -}}
{{- end -}}
{{- if and $postgres.caSecret.name (has $postgres.sslmode (list "disable" "prefer" "require")) -}}
{{- fail (printf "%s: postgres.caSecret is of no use with postgres.sslmode=%s: make it verify-full" .who $postgres.sslmode) -}}
{{- end -}}
{{- $postgres | toJson | replace "{service}" .who -}}
{{- end -}}

{{/* Environment of Kafka. Takes the result of penstock.kafka, and root. */}}
{{- define "penstock.kafka.env" -}}
- {name: PENSTOCK_KAFKA, value: {{ .kafka.bootstrapServers | quote }}}
- {name: PENSTOCK_PREFIX, value: {{ .root.Values.prefix | quote }}}
- {name: PENSTOCK_KAFKA_PROTOCOL, value: {{ .kafka.protocol }}}
{{- if .kafka.tls.caSecret.name }}
- {name: PENSTOCK_KAFKA_CA_FILE, value: /etc/penstock/kafka/ca.crt}
{{- end }}
{{- if .kafka.tls.clientSecret.name }}
- {name: PENSTOCK_KAFKA_CERT_FILE, value: /etc/penstock/kafka/client.crt}
- {name: PENSTOCK_KAFKA_KEY_FILE, value: /etc/penstock/kafka/client.key}
{{- end }}
{{- with .kafka.sasl }}
{{- if .mechanism }}
- {name: PENSTOCK_KAFKA_MECHANISM, value: {{ .mechanism }}}
{{- if eq .mechanism "OAUTHBEARER" }}
- {name: PENSTOCK_KAFKA_TOKEN_URL, value: {{ .oauth.tokenUrl | quote }}}
- {name: PENSTOCK_KAFKA_CLIENT_ID, value: {{ .oauth.clientId | quote }}}
- {name: PENSTOCK_KAFKA_CLIENT_SECRET_FILE, value: /etc/penstock/kafka/client-secret}
{{- with .oauth.scope }}
- {name: PENSTOCK_KAFKA_SCOPE, value: {{ . | quote }}}
{{- end }}
{{- else }}
{{- if .userSecret.name }}
- name: PENSTOCK_KAFKA_USER
  valueFrom: {secretKeyRef: {name: {{ .userSecret.name }}, key: {{ .userSecret.key }}}}
{{- else }}
- {name: PENSTOCK_KAFKA_USER, value: {{ .user | quote }}}
{{- end }}
- {name: PENSTOCK_KAFKA_PASSWORD_FILE, value: /etc/penstock/kafka/password}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Sources of the projected volume at /etc/penstock/kafka; empty without secrets. */}}
{{- define "penstock.kafka.sources" -}}
{{- with .tls.caSecret }}{{ if .name }}
- secret: {name: {{ .name }}, items: [{key: {{ .key }}, path: ca.crt}]}
{{- end }}{{ end }}
{{- with .tls.clientSecret }}{{ if .name }}
- secret: {name: {{ .name }}, items: [{key: {{ .certKey }}, path: client.crt}, {key: {{ .keyKey }}, path: client.key}]}
{{- end }}{{ end }}
{{- if eq .sasl.mechanism "OAUTHBEARER" }}
- secret: {name: {{ .sasl.oauth.clientSecret.name }}, items: [{key: {{ .sasl.oauth.clientSecret.key }}, path: client-secret}]}
{{- else if .sasl.mechanism }}
- secret: {name: {{ .sasl.passwordSecret.name }}, items: [{key: {{ .sasl.passwordSecret.key }}, path: password}]}
{{- end }}
{{- end -}}

{{/* Environment of PostgreSQL. Takes the result of penstock.postgres. The driver reads PGSSLMODE and PGSSLROOTCERT when the URL has no such parameter. */}}
{{- define "penstock.postgres.env" -}}
- name: PENSTOCK_POSTGRES
  valueFrom: {secretKeyRef: {name: {{ .url.name }}, key: {{ .url.key }}}}
{{- if .sessionUrl.name }}
- name: PENSTOCK_POSTGRES_SESSION
  valueFrom: {secretKeyRef: {name: {{ .sessionUrl.name }}, key: {{ .sessionUrl.key }}}}
{{- end }}
{{- if .passwordSecret.name }}
- {name: PENSTOCK_POSTGRES_PASSWORD_FILE, value: /etc/penstock/postgres/password}
{{- end }}
{{- /* With a certificate authority the server is verified by default. */}}
{{- with .sslmode | default (ternary "verify-full" "" (ne .caSecret.name "")) }}
- {name: PGSSLMODE, value: {{ . }}}
{{- end }}
{{- if .caSecret.name }}
- {name: PGSSLROOTCERT, value: /etc/penstock/postgres/ca.crt}
{{- end }}
{{- end -}}

{{- define "penstock.postgres.sources" -}}
{{- with .caSecret }}{{ if .name }}
- secret: {name: {{ .name }}, items: [{key: {{ .key }}, path: ca.crt}]}
{{- end }}{{ end }}
{{- with .passwordSecret }}{{ if .name }}
- secret: {name: {{ .name }}, items: [{key: {{ .key }}, path: password}]}
{{- end }}{{ end }}
{{- end -}}

{{/* Environment of the object store. Takes root. */}}
{{- define "penstock.objects.env" -}}
{{- with .Values.objects -}}
{{- if not .url -}}
{{- fail "objects.url is empty: gateway, task-sync and workers need an object store, as s3://bucket/prefix" -}}
{{- end -}}
{{- if and (hasPrefix "file:" .url) (not .existingClaim) -}}
{{- fail (printf "objects.url is %s, so objects.existingClaim must name a claim that all pods can write (ReadWriteMany)" .url) -}}
{{- end -}}
- {name: PENSTOCK_OBJECTS, value: {{ .url | quote }}}
{{- with .region }}
- {name: AWS_REGION, value: {{ . | quote }}}
{{- end }}
{{- with .endpoint }}
- {name: AWS_ENDPOINT_URL, value: {{ . | quote }}}
{{- if hasPrefix "http:" . }}
- {name: AWS_ALLOW_HTTP, value: "true"}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "penstock.logs.env" -}}
- {name: PENSTOCK_LOG_FORMAT, value: {{ .Values.logs.format }}}
- {name: PENSTOCK_LOG_LEVEL, value: {{ .Values.logs.level }}}
{{- end -}}

{{- define "penstock.tracing.env" -}}
{{- with .Values.tracing.endpoint }}
- {name: OTEL_EXPORTER_OTLP_ENDPOINT, value: {{ . | quote }}}
{{- end }}
{{- end -}}
