#!/usr/bin/env bash
# Make a virtual environment in which SGLang serves on a CPU, for the `engines` tests.
# Its published wheels have kernels for GPUs only: the functions that its CPU mode calls at start-up are stubbed, and
# plain torch computes (slow, and good for tests).
#   scripts/make_sglang_venv.sh [FOLDER]      (default .venv-sglang)
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv-sglang}
bash scripts/make_venv.sh "$venv" sglang
"$venv/bin/python" - <<'PY'
import pathlib, site

folder = pathlib.Path(site.getsitepackages()[0])
# SGLang imports torchvision for vision models; its compiled library is built for GPUs and does not load.
path = folder / "torchvision" / "_meta_registrations.py"
text, before = path.read_text(), "@functools.lru_cache(None)\ndef get_meta_lib"
define = (
    'for _name in ("nms", "qnms"):\n'
    '    torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")\n'
)
if define not in text:
    path.write_text(text.replace(before, f"{define}\n\n{before}", 1))
(folder / "sgl_kernel").mkdir(exist_ok=True)
(folder / "sgl_kernel" / "__init__.py").write_text('''"""Stubs of the kernels that SGLang's CPU mode calls at start-up; plain torch computes."""
import torch

_library = torch.library.Library("sgl_kernel", "DEF")
_library.define("init_cpu_threads_env(str cpus) -> ()")
_library.define("initialize(int size, int rank) -> ()")
torch.library.impl(_library, "init_cpu_threads_env", "CompositeExplicitAutograd")(lambda cpus: None)
torch.library.impl(_library, "initialize", "CompositeExplicitAutograd")(lambda size, rank: None)


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} is for GPUs")

    return missing
''')
PY
SGLANG_USE_CPU_ENGINE=1 "$venv/bin/python" -c "import sglang; print('sglang', sglang.__version__)"
