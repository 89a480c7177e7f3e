#!/usr/bin/env bash
# Both learning benches at once: bench/learning.sh SECONDS OUT [JOBS [arguments of bench.agentflow …]]
#
# Runs are kept in runs/learning. A second call goes on where the first one was stopped. What is finished is reported
# into OUT: agentflow.json, solver_verifier.json and the tables that the benches print (*.out).
set -u
seconds=${1:?seconds} out=${2:?folder} jobs=${3:-$(nproc)}
shift $(($# < 3 ? $# : 3))
cd "$(dirname "$0")/.." || exit 1
export PYTHONPATH="$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p runs/learning "$out"

bench() { # NAME SECONDS JOBS ARGUMENTS…
    local name=$1 seconds=$2 jobs=$3
    shift 3
    "${PYTHON:-python3}" -m "bench.$name" --jobs "$jobs" --threads 2 --seconds "$seconds" ${QUICK:+--quick} \
        --keep "runs/learning/$name" --json "$out/$name.json" "$@" >"$out/$name.out" 2>>"$out/$name.log"
}

# The second call of each, after one that failed, reports what is finished.
{ bench solver_verifier "$seconds" $((jobs > 4 ? jobs / 4 : 1)) || bench solver_verifier 0 1; } &
bench agentflow "$seconds" $((jobs > 4 ? jobs * 3 / 4 : 1)) "$@" || bench agentflow 0 1 "$@"
wait
tail -n 30 "$out"/*.log
cat "$out"/*.out
