#!/usr/bin/env bash
# A virtual environment with verl and TRL, whose numbers `pytest -m oracle` compares ours with. It lives apart because
# they pin their own. Both are installed without what they depend on: only their functions of numbers are called.
# One that is there already is used again; remove its folder to make it anew.
#   scripts/make_oracle_venv.sh [FOLDER]      (default .venv-oracle)
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv-oracle}
if [ ! -f "$venv/.installed" ]; then
    rm -rf "$venv"
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet --upgrade pip
    "$venv/bin/pip" install --quiet -c constraints.txt torch numpy omegaconf hydra-core tensordict ray pandas \
        "transformers>=5.5.3,<5.11" accelerate datasets peft codetiming orjson torchdata dill cachetools pyvers \
        pybind11 pylatexenc jmespath
    "$venv/bin/pip" install --quiet --no-deps "verl==0.9.1" "trl==1.16.0"
    touch "$venv/.installed"
fi
"$venv/bin/python" -c "import importlib.metadata as m; print(*(f'{n} {m.version(n)}' for n in ('verl', 'trl', 'torch')))"
