#!/bin/sh
# Makes the secrets that are missing in a folder (deploy/secrets): a certificate of its own for the
# names given, one API key, and Grafana's password. What is there is left alone, but for a
# certificate made here that lacks a name given: it is made anew, for the old names and the new.
#
#   deploy/secrets.sh [HOST …]        the names that clients will use; default: localhost
#   SECRETS=FOLDER deploy/secrets.sh
set -eu
umask 077
folder=${SECRETS:-$(dirname "$0")/secrets}
mkdir -p "$folder"
cd "$folder"
# The folder keeps others of this machine out. The files must be readable: the containers' user,
# which is not this one, reads them through mounts of their own.
chmod 700 .

random() { openssl rand -base64 48 | tr -dc 'A-Za-z0-9' | cut -c1-"$1"; }

names=DNS:localhost,IP:127.0.0.1
if [ -e tls_certificate ]; then
    names=$(openssl x509 -in tls_certificate -noout -ext subjectAltName 2>/dev/null |
        sed -n '2,$ { s/IP Address:/IP:/g; s/ //g; p; }')
fi
missing=
for host in "$@"; do
    case $host in
        *[!0-9.]*) name=DNS:$host check=-checkhost ;;
        *) name=IP:$host check=-checkip ;;
    esac
    if [ ! -e tls_certificate ] ||
        openssl x509 -in tls_certificate -noout "$check" "$host" | grep -q "does NOT match"; then
        missing="$missing,$name"
    fi
done
if [ ! -e tls_certificate ] && [ ! -e tls_key ] || [ -n "$missing" ]; then
    if [ -e tls_certificate ] &&
        ! openssl x509 -in tls_certificate -noout -issuer | grep -q 'O = Jitney made here'; then
        echo "tls_certificate is not for ${missing#,}, and this script has not made it:" \
            "remove it and tls_key to have others made" >&2
        exit 1
    fi
    names=$names$missing
    # In place: containers have these very files.
    made=$(openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 365 \
        -subj "/O=Jitney made here/CN=${1:-localhost}" -addext "subjectAltName=${names#,}" \
        -keyout - 2>/dev/null)
    printf '%s\n' "$made" | sed -n '/BEGIN CERT/,/END CERT/p' >tls_certificate
    printf '%s\n' "$made" | sed -n '/BEGIN PRIVATE/,/END PRIVATE/p' >tls_key
    echo "made a certificate that signs itself (${names#,}): clients need $folder/tls_certificate"
fi
if [ ! -e api_keys ]; then
    printf '# NAME:KEY, one a line, then its limits, if any; the name stands in the log.\nfirst:%s\n' "$(random 43)" >api_keys
    echo "made the API key 'first' in $folder/api_keys"
fi
if [ ! -e grafana_password ]; then
    random 24 >grafana_password
    echo "made the password of Grafana's user admin in $folder/grafana_password"
fi
chmod 644 tls_certificate tls_key api_keys grafana_password
