#!/usr/bin/env bash
# Makes the trainers' environment: their published packages in a virtual environment of their own, and behind them those of the main one.
# Seconds and 60 MB, since torch is shared.  Usage: make_environment.sh <main environment> <new environment>
set -euo pipefail

main=$(realpath "$1")
new=$2
here=$(dirname "$(realpath "${BASH_SOURCE[0]}")")

"$main/bin/python" -m venv "$new"
main_packages=$("$main/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
new_packages=$("$new/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "import site; site.addsitedir('$main_packages')" >"$new_packages/main_environment.pth"
"$new/bin/python" -m pip install --quiet --no-deps -r "$here/requirements.txt"
