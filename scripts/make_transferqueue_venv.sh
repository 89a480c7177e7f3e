#!/usr/bin/env bash
# A virtual environment with TransferQueue and its Ray, the peer of `bench.dataflow`. It lives apart because it pins its own.
#   scripts/make_transferqueue_venv.sh [FOLDER]      (default .venv-transferqueue)
set -euo pipefail
venv=${1:-.venv-transferqueue}
python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --upgrade pip
"$venv/bin/pip" install --quiet -c "$(dirname "$0")/../constraints.txt" "TransferQueue==0.1.11"
"$venv/bin/python" -c "import importlib.metadata as m; print('TransferQueue', m.version('TransferQueue'), 'ray', m.version('ray'))"
