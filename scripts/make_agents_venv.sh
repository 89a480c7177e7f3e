#!/usr/bin/env bash
# A virtual environment for each package whose agents play in `tests/conformance`. They live apart because each brings
# its own versions of the others. One that is there already is used again; remove its folder to make it anew.
#   scripts/make_agents_venv.sh [NAME…]      (default: all, under .venv-agents)
set -euo pipefail
cd "$(dirname "$0")/.."
names=("$@")
[ $# -gt 0 ] || names=(openai anthropic openai-agents langchain-openai litellm mini-swe-agent openenv-core)
for name in "${names[@]}"; do
    venv=.venv-agents/$name
    if [ ! -f "$venv/.installed" ]; then
        rm -rf "$venv"
        python3 -m venv "$venv"
        packages=("$name")
        # LiteLLM imports `mcp` for any call with tools, and declares it as an extra only.
        case $name in litellm | mini-swe-agent) packages+=("litellm[mcp]") ;; esac
        # Most of what comes along is never imported: what is, is compiled then.
        "$venv/bin/pip" install --quiet --disable-pip-version-check --no-compile "${packages[@]}"
        touch "$venv/.installed"
    fi
    "$venv/bin/python" -c "import importlib.metadata as m, sys; print(sys.argv[1], m.version(sys.argv[1]))" "$name"
done
