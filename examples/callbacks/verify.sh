#!/usr/bin/env bash
# Verifies a received callback with openssl; exit status 0 means that one signature is right.
#
#     ./verify.sh KEY BODY ID TIMESTAMP SIGNATURES            # the header webhook-signature
#     ./verify.sh KEY BODY ID TIMESTAMP SIGNATURES URL        # the header webhook-audience-signature
#
# KEY is a file with a shared secret (whsec_…) or a public key (whpk_…), BODY a file with the raw
# body, ID and TIMESTAMP are the headers webhook-id and webhook-timestamp. URL is this receiver's, as
# tasks name it. openssl has a shared secret in its arguments, which other users of the machine can
# read; a public key is no secret.
set -euo pipefail
export LC_ALL=C

(($# == 5 || $# == 6)) || { echo 'usage: verify.sh KEY BODY ID TIMESTAMP SIGNATURES [URL]' >&2; exit 2; }
key=$(<"$1") body=$2 id=$3 timestamp=$4 signatures=$5
[[ $# == 6 ]] && id="$6 $3"
[[ $timestamp =~ ^[0-9]{1,12}$ ]] || exit 1
age=$(($(date +%s) - timestamp))
((age <= 300 && age >= -300)) || { echo 'the callback is older than five minutes' >&2; exit 1; }

dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
{ printf '%s.%s.' "$id" "$timestamp"; cat "$body"; } >"$dir/content"
case $key in
whsec_*)
  hex=$(base64 -d <<<"${key#whsec_}" | od -An -v -tx1 | tr -d ' \n')
  expected=$(openssl dgst -sha256 -mac HMAC -macopt "hexkey:$hex" -binary <"$dir/content" | base64 -w0)
  for entry in $signatures; do [[ $entry == "v1,$expected" ]] && exit 0; done
  ;;
whpk_*)
  # DER of an ed25519 public key (RFC 8410).
  { printf '\x30\x2a\x30\x05\x06\x03\x2b\x65\x70\x03\x21\x00'; base64 -d <<<"${key#whpk_}"; } >"$dir/key.der"
  for entry in $signatures; do
    [[ $entry == v1a,* ]] || continue
    base64 -d <<<"${entry#v1a,}" >"$dir/signature"
    openssl pkeyutl -verify -pubin -keyform DER -inkey "$dir/key.der" -rawin -in "$dir/content" \
      -sigfile "$dir/signature" >/dev/null 2>&1 && exit 0
  done
  ;;
*) echo 'a key begins with whsec_ or whpk_' >&2; exit 2 ;;
esac
echo 'no signature is right' >&2
exit 1
