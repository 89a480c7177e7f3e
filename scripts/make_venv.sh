#!/usr/bin/env bash
# Make the virtual environment FOLDER with the packages of lock files, and nothing else.
#   scripts/make_venv.sh FOLDER NAME…      (each NAME is a file requirements/NAME.txt)
# An environment that was made from the same files is used again. PYTHON is the interpreter (default python3). UV, if
# set, is the program `uv`: it makes and fills environments in a tenth of pip's time, but does not read pip's settings,
# so that torch, of which there are several builds, is left to pip.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
venv=$1
shift
locks=()
for name in "$@"; do locks+=("$root/requirements/$name.txt"); done
stamp="$venv/.locked-$(IFS=-; echo "$*")"
made=$(cat "${locks[@]}" "$root/requirements/build.txt" | cksum)
if [ "$(cat "$stamp" 2> /dev/null)" = "$made" ]; then exit 0; fi
with_torch=$(grep -l '^torch==' "${locks[@]}" || true)
# Packages are compiled when they are first imported: most never are.
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile)
if [ ! -x "$venv/bin/python" ]; then
    "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Rillflow needs Python 3.11 or later")'
    if [ -n "${UV:-}" ] && [ -z "$with_torch" ]; then
        "$UV" venv --quiet --python "$(command -v "${PYTHON:-python3}")" "$venv"
    else
        "${PYTHON:-python3}" -m venv "$venv"
        "${pip[@]}" -c "$root/requirements/build.txt" pip
    fi
fi
build=(--build-constraint "$root/requirements/build.txt")
if [ -n "$with_torch" ] && [ ! -d "$venv"/lib/python3*/site-packages/torch ]; then
    # With dependencies: only pip knows whether this machine's build of torch requires the CUDA packages.
    "${pip[@]}" "${build[@]}" -c "$root/requirements/cuda.txt" "${locks[@]/#/--constraint=}" torch
fi
install=("${pip[@]}")
if [ -n "${UV:-}" ]; then install=("$UV" pip install --quiet --python "$venv/bin/python"); fi
"${install[@]}" "${build[@]}" --no-deps "${locks[@]/#/--requirement=}"
echo "$made" > "$stamp"
