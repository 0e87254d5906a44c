#!/usr/bin/env bash
# Install Chromium where this is root and the system has Debian's packages; nothing otherwise.
set -euo pipefail
if [ "$(id -u)" != 0 ] || command -v chromium >/dev/null || ! command -v apt-get >/dev/null; then exit 0; fi
export DEBIAN_FRONTEND=noninteractive
apt-get update --quiet --quiet
apt-get install --yes --quiet --quiet --no-install-recommends chromium ||
    echo "Chromium cannot be installed here: the tests of the report in a browser will be skipped" >&2
