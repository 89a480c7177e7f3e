#!/usr/bin/env bash
# A virtual environment in which SGLang serves on a CPU, for the `engines` tests.
# It lives apart because SGLang pins its own torch and transformers. Its published wheels have kernels for GPUs only:
# what its CPU mode asks of them at start-up is stubbed, and plain torch computes (slow, and good for tests).
#   scripts/make_sglang_venv.sh [FOLDER]      (default .venv-sglang)
set -euo pipefail
venv=${1:-.venv-sglang}
release=0.5.23
python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --upgrade pip
# Its requirements, less everything that only GPUs, sounds and pictures need.
"$venv/bin/pip" install --quiet torch==2.13.0 "transformers<5.20" triton \
    IPython aiohttp anthropic apache-tvm-ffi blobfile build compressed-tensors datasets distro einops fastapi gguf \
    interegular llguidance mistral_common modelscope msgspec ninja numba numpy openai openai-harmony==0.0.4 orjson \
    outlines==0.1.11 packaging partial_json_parser pillow prometheus-client psutil py-spy pybase64 pydantic \
    python-multipart pyzmq regex requests scipy sentencepiece setproctitle soundfile tiktoken tokenizers tqdm uvicorn \
    uvloop watchfiles xgrammar xxhash zstandard easydict
"$venv/bin/pip" install --quiet --no-deps "sglang==$release" torchvision==0.28.0
"$venv/bin/python" - <<'PY'
import pathlib, site

folder = pathlib.Path(site.getsitepackages()[0])
# Imported for models that see pictures; its own library was built for GPUs and does not load.
path = folder / "torchvision" / "_meta_registrations.py"
text, before = path.read_text(), "@functools.lru_cache(None)\ndef get_meta_lib"
define = (
    'for _name in ("nms", "qnms"):\n'
    '    torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")\n'
)
if define not in text:
    path.write_text(text.replace(before, f"{define}\n\n{before}", 1))
(folder / "sgl_kernel").mkdir(exist_ok=True)
(folder / "sgl_kernel" / "__init__.py").write_text('''"""What SGLang's CPU mode asks of its kernels where it starts; plain torch computes."""
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
