#!/usr/bin/env bash
# Afterwards iproute2, sshd and pdsh are here, from Debian; no service is started. What cannot be had is said, no error:
# the tests that need it skip, and say so too.
set -uo pipefail
missing=()
command -v ip >/dev/null && command -v tc >/dev/null || missing+=(iproute2)
[ -x /usr/sbin/sshd ] || missing+=(openssh-server)
command -v ssh >/dev/null || missing+=(openssh-client)
command -v pdsh >/dev/null || missing+=(pdsh)
[ ${#missing[@]} -eq 0 ] && exit 0
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "tests/multinode: ${missing[*]} missing, and only root on Debian can install them here" >&2
    exit 0
fi
# sshd must not listen on the machine's own network.
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
    printf '#!/bin/sh\nexit 101\n' >$policy
    chmod +x $policy
    trap 'rm -f $policy' EXIT
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null ||
    echo "tests/multinode: apt-get could not install ${missing[*]}" >&2
