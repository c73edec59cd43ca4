{{/* A manifest of deploy/k8s, in the release's namespace. Arguments: the context, the file. */}}
{{- define "elasticd.manifest" -}}
{{- $ := index . 0 -}}
{{- $.Files.Get (printf "manifests/%s" (index . 1)) | replace ".elasticd.svc" (printf ".%s.svc" $.Release.Namespace) -}}
{{- end -}}

{{/* An object as YAML, with its namespace and labels. Arguments: the context, the object. */}}
{{- define "elasticd.object" -}}
{{- $ := index . 0 -}}
{{- $object := index . 1 -}}
{{- if not (has $object.kind (list "PriorityClass" "ClusterRole" "ClusterRoleBinding" "ValidatingAdmissionPolicy" "ValidatingAdmissionPolicyBinding")) -}}
{{- $_ := set $object.metadata "namespace" $.Release.Namespace -}}
{{- end -}}
{{- $labels := dict "app.kubernetes.io/part-of" "elasticd" "helm.sh/chart" (printf "%s-%s" $.Chart.Name $.Chart.Version) "app.kubernetes.io/managed-by" $.Release.Service -}}
{{- $_ := set $object.metadata "labels" (merge $labels ($object.metadata.labels | default dict)) -}}
{{- toYaml $object -}}
{{- end -}}

{{/* agent.toml. */}}
{{- define "elasticd.config" -}}
{{- $config := include "elasticd.manifest" (list . "agent.toml") -}}
{{- if and .Values.etcd.endpoints .Values.etcd.enabled }}{{ fail "etcd.endpoints: they are of an etcd of yours: set etcd.enabled to false, or leave them out for the chart's own etcd" }}{{ end -}}
{{- if and .Values.etcd.endpoints .Values.agentConfig }}{{ fail "etcd.endpoints: agentConfig is all of agent.toml: give them there" }}{{ end -}}
{{- if .Values.agentConfig -}}
{{- .Values.agentConfig -}}
{{- else if .Values.etcd.enabled -}}
{{- $config -}}
{{- else -}}
{{- if not .Values.etcd.endpoints }}{{ fail "etcd.endpoints: the addresses of your etcd, where etcd.enabled is false" }}{{ end -}}
{{- regexReplaceAll "(?s)endpoints = \\[.*?\\]" $config (printf "endpoints = %s" (.Values.etcd.endpoints | toJson)) -}}
{{- end -}}
{{- end -}}

{{- define "elasticd.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
