#!/usr/bin/env bash
# Make a virtual environment for each package whose agents play in `tests/conformance`. They are separate because each
# package pins its own versions of the others.
#   scripts/make_agents_venv.sh [NAME…]      (default: all, under .venv-agents)
set -euo pipefail
cd "$(dirname "$0")/.."
names=("$@")
[ $# -gt 0 ] || names=(
    openai anthropic openai-agents langchain-openai litellm mini-swe-agent openenv-core
    pydantic-ai-slim smolagents dspy autogen-agentchat instructor crewai
)
for name in "${names[@]}"; do
    bash scripts/make_venv.sh ".venv-agents/$name" "agents-$name"
    ".venv-agents/$name/bin/python" -c "import importlib.metadata as m, sys; print(sys.argv[1], m.version(sys.argv[1]))" "$name"
done
