#!/usr/bin/env bash
# A virtual environment with the LiteLLM proxy, the peer of `bench.gateway`. It lives apart because it pins its own.
#   scripts/make_litellm_venv.sh [FOLDER]      (default .venv-litellm)
set -euo pipefail
venv=${1:-.venv-litellm}
python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --upgrade pip
"$venv/bin/pip" install --quiet "litellm[proxy]"
"$venv/bin/python" -c "import importlib.metadata as m; print('litellm', m.version('litellm'))"
