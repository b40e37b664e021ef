#!/usr/bin/env bash
# A worker in bash, curl and awk: it runs a command for each task of a type, one at a time.
#
#     PENSTOCK_GATEWAY=http://127.0.0.1:8420 ./worker.sh TYPE COMMAND [ARGUMENT…]
#
# If the gateway authenticates, set PENSTOCK_API_KEY to a key with the role worker.
#
# The command reads the task's context as JSON and writes the result as JSON (no output is null).
# PENSTOCK_TASK_ID, PENSTOCK_STAGE and PENSTOCK_ATTEMPT identify the attempt. A stage name on file
# descriptor 3 is the next stage, with the result as its context. Exit status 0 is done, 75
# (EX_TEMPFAIL) is a retry after RETRY_MS, and any other is a failure with the end of standard
# error. When the attempt is revoked, the command gets SIGTERM and nothing is reported.
set -uo pipefail
set -m # each background job is a process group of its own, so that it can be ended with its children
export LC_ALL=C

type=${1:?usage: worker.sh TYPE COMMAND [ARGUMENT…]}
shift
gateway=${PENSTOCK_GATEWAY:-http://127.0.0.1:8420}
host=$(hostname)
worker=$host-$$
retry_ms=${RETRY_MS:-10000}
dir=$(mktemp -d)
running='' stopping=''
# In a file, because every user of the machine can read curl's arguments.
(umask 077; [[ -z ${PENSTOCK_API_KEY-} ]] || printf 'header = "Authorization: Bearer %s"\n' "$PENSTOCK_API_KEY") >"$dir/curl"

# A running task finishes; waiting for work stops at once.
trap 'stopping=1; [[ -n $running ]] && kill -- "-$running" 2>/dev/null' TERM INT
trap 'rm -rf "$dir"' EXIT

# Posts standard input and writes the answer, or the error to standard error. Repeats the request
# after Retry-After when the gateway does not answer, or answers 429 or 503.
post() {
  local body=$dir/body.$BASHPID answer=$dir/answer.$BASHPID status
  cat >"$body"
  while :; do
    curl --config "$dir/curl" --silent --show-error --fail-with-body --max-time 60 --retry 1000000 --retry-delay 1 \
      --header 'Content-Type: application/json' --data-binary "@$body" --output "$answer" "$gateway/$1"
    status=$?
    # Status 22 is an HTTP error. With any other there was no answer, and repeating the request is
    # safe.
    ((status == 0 || status == 22)) && break
    sleep 1
  done
  if ((status == 0)); then cat "$answer"; else cat "$answer" >&2; fi
  rm -f "$body" "$answer"
  return $status
}

# Prints the members of the JSON object on standard input, each as name, tab and raw value.
members() {
  awk '
    { text = text $0 }
    END {
      length_ = length(text)
      for (i = 1; i <= length_; i++) {
        c = substr(text, i, 1)
        if (inside) {                       # a string
          if (escaped) escaped = 0
          else if (c == "\\") escaped = 1
          else if (c == "\"") inside = 0
        } else if (c == "\"") inside = 1
        else if (c == "{" || c == "[") { if (++depth == 1) { begin = i + 1; continue } }
        else if (c == "}" || c == "]") depth--
        else if (c == ":" && depth == 1 && !colon) { colon = i; continue }
        if ((c == "," && !inside && depth == 1) || (depth == 0 && begin)) {
          if (colon) {
            name = substr(text, begin, colon - begin)
            gsub(/^[ \t]*"|"[ \t]*$/, "", name)
            print name "\t" substr(text, colon + 1, i - colon - 1)
          }
          begin = i + 1; colon = 0
          if (depth == 0) exit
        }
      }
    }'
}

# Sends a heartbeat three times in each lease; ends the command (process group $1) when the attempt
# is revoked.
beat() {
  local every answer name value
  every=$(awk -v ms="${task[lease_ms]}" 'BEGIN { print ms / 3000 }')
  while sleep "$every"; do
    answer=$(report progress ", \"lease_ms\": ${task[lease_ms]}") || continue
    while IFS=$'\t' read -r name value; do
      if [[ $name == gone && ${value//[[:space:]]/} != '[]' ]]; then
        touch "$dir/gone"
        kill -- "-$1" 2>/dev/null
        return
      fi
    done < <(members <<<"$answer")
  done
}

# Reports the task with outcome $1; $2, then standard input if $3 says so, and $4 complete the
# entry.
report() {
  {
    printf '{"worker": "%s", "results": [{"id": %s, "step": %s, "stage": %s, "attempt": %s, "outcome": "%s"%s' \
      "$worker" "${task[id]}" "${task[step]}" "${task[stage]}" "${task[attempt]}" "$1" "${2-}"
    [[ -n ${3-} ]] && cat "$3"
    printf '}]}'
  } | post set_task
}

# Prints the end of a file, escaped for a JSON string.
quoted() {
  tail -c 2000 "$1" | tr -cd '[:print:]\n' | awk '{ gsub(/[\\"]/, "\\\\&"); printf "%s%s", (NR > 1 ? "\\n" : ""), $0 }'
}

fail() {
  report fail ", \"error\": {\"kind\": \"$1\", \"message\": \"$(quoted "$dir/err")\"}" >/dev/null
}

work() {
  local status beating stage=${task[stage]//\"/}
  rm -f "$dir/gone"
  : >"$dir/next"
  PENSTOCK_TASK_ID=${task[id]} PENSTOCK_STAGE=$stage PENSTOCK_ATTEMPT=${task[attempt]} \
    "$@" <"$dir/context" >"$dir/out" 2>"$dir/err" 3>"$dir/next" &
  local command=$!
  beat "$command" &
  beating=$!
  # A signal to this script interrupts the wait, but not the command.
  while wait "$command"; status=$?; kill -0 "$command" 2>/dev/null; do :; done
  kill -- "-$beating" 2>/dev/null
  wait "$beating" 2>/dev/null
  if [[ -e $dir/gone ]]; then
    echo "task ${task[id]} is no longer ours"
    return
  fi
  [[ -s $dir/out ]] || echo null >"$dir/out"
  if ((status == 75)); then
    report retry ", \"delay_ms\": $retry_ms" >/dev/null
  elif ((status != 0)); then
    fail "Exit$status"
  elif [[ -s $dir/next ]]; then
    report next ", \"next_stage\": \"$(quoted "$dir/next")\", \"context\": " "$dir/out" >/dev/null
  else
    report 'done' ', "context": ' "$dir/out" >/dev/null
  fi || {
    # The gateway rejects the report: the output is not JSON, or too long.
    echo 'what it wrote was refused' >"$dir/err"
    fail Refused
  }
  echo "task ${task[id]} $stage: status $status"
}

while [[ -z $stopping ]]; do
  post hold_task <<<"{\"worker\": \"$worker\", \"type\": \"$type\", \"max\": 1, \"wait_s\": 20, \"host\": \"$host\"}" >"$dir/held" &
  running=$!
  # A signal between the condition and this line found no request that it could end.
  [[ -n $stopping ]] && kill -- "-$running" 2>/dev/null
  # Rejected: for example, the type is not registered yet.
  wait "$running" || { [[ -n $stopping ]] || sleep 1; continue; }
  running=''
  declare -A held=() task=()
  while IFS=$'\t' read -r name value; do held[$name]=$value; done < <(members <"$dir/held")
  [[ ${held[tasks]//[[:space:]]/} == '[]' ]] && continue
  one=${held[tasks]#*[}
  while IFS=$'\t' read -r name value; do task[$name]=$value; done < <(members <<<"${one%]*}")
  printf '%s' "${task[context]}" >"$dir/context"
  work "$@"
done
