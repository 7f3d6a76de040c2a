#!/bin/sh
# Makes the secrets that are missing in a folder (deploy/secrets): a certificate for the given names,
# which signs itself, one API key, and Grafana's password.
#
# What is there stays. There is one exception: if a certificate that this script has made lacks a
# given name, it is made anew, for its old names and the new one.
#
#   deploy/secrets.sh [HOST …]        the names that clients will use; default: localhost
#   SECRETS=FOLDER deploy/secrets.sh
set -eu
umask 077
folder=${SECRETS:-$(dirname "$0")/secrets}
mkdir -p "$folder"
cd "$folder"
# Only the user of this script may enter the folder. The files in it are readable for all (below),
# because the containers' user reads them, each through a mount of its own.
chmod 700 .

random() { openssl rand -base64 48 | tr -dc 'A-Za-z0-9' | cut -c1-"$1"; }

# A certificate and its key are two halves: neither is made without the other.
halves=0
for half in tls_certificate tls_key; do
    if [ -e "$half" ]; then halves=$((halves + 1)); fi
done
if [ "$halves" = 1 ]; then
    echo "there is only one of tls_certificate and tls_key: put the other one beside it," \
        "or remove it to have both made" >&2
    exit 1
fi

# The names that a certificate must have: those of the present one, and the given ones.
names=DNS:localhost,IP:127.0.0.1
if [ -e tls_certificate ]; then
    names=$(openssl x509 -in tls_certificate -noout -ext subjectAltName 2>/dev/null |
        sed -n '2,$ { s/IP Address:/IP:/g; s/ //g; p; }')
fi
missing=
for host in "$@"; do
    case $host in
        *[!0-9.]*)
            name=DNS:$host
            check=-checkhost
            ;;
        *)
            name=IP:$host
            check=-checkip
            ;;
    esac
    # openssl says in words whether a certificate is for a name; its status is 0 either way.
    if [ ! -e tls_certificate ] ||
        openssl x509 -in tls_certificate -noout "$check" "$host" | grep -q "does NOT match"; then
        missing="$missing,$name"
    fi
done

if [ ! -e tls_certificate ] || [ -n "$missing" ]; then
    if [ -e tls_certificate ] &&
        ! openssl x509 -in tls_certificate -noout -issuer | grep -q 'O = Jitney made here'; then
        echo "tls_certificate is not for ${missing#,}, and this script has not made it:" \
            "remove it and tls_key to have others made" >&2
        exit 1
    fi
    names=$names$missing
    # The files are overwritten, not replaced: containers that run have mounted these files, and would
    # not see others of the same names.
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
