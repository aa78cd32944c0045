#!/usr/bin/env bash
# Installs what the tests need (first call only), then runs every check the way CI does, also after a failed one.
set -uo pipefail

usage() {
    cat <<'TEXT'
usage: ./scripts/test.sh [--fast] [pytest arguments ...]

  --fast                  unit tests only, and at most 3 cases of each
  pytest arguments        for both pytest runs, for example -x, -k router or --durations=10
TEXT
}

fast=0
pytest_arguments=()
for argument in "$@"; do
    case "$argument" in
        -h | --help) usage; exit 0 ;;
        --fast) fast=1 ;;
        *) pytest_arguments+=("$argument") ;;
    esac
done

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
source scripts/setup_env.sh
setup_env dev || exit 1

# Ranks and test processes share few cores: more threads than this only get in each other's way.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

trap 'kill "${types_pid:-}" 2>/dev/null; exit 130' INT
summary=()
failed=0
closing_line=""

# phase NAME COMMAND ...: one heading, the command's own output, one line for the summary.
phase() {
    local name="$1" start=$SECONDS status=0 result=ok
    shift
    echo "=== $name"
    "$@" </dev/null || status=$?
    if [ "$status" -ne 0 ]; then
        result="FAILED (exit code $status)"
        failed=1
    fi
    summary+=("$(printf '%-20s %4d s  %s' "$name" "$((SECONDS - start))" "$result")")
}

# Runs pytest with the arguments given and keeps its closing line. Exit code 5, no test ran, is a failure unless
# the arguments of this script chose.
run_pytest() {
    local output status=0
    output="$(mktemp)"
    "$PYTHON" -m pytest "$@" ${pytest_arguments[@]+"${pytest_arguments[@]}"} 2>&1 | tee "$output" || status=$?
    closing_line="$(tail -n 1 "$output")"
    rm -f "$output"
    if [ "$status" -eq 5 ] && [ "${#pytest_arguments[@]}" -gt 0 ]; then
        status=0
    fi
    return "$status"
}

# The type checker keeps one core busy for half a minute: it starts here, and its phase waits for it.
types_output="$(mktemp)"
"$PYTHON" -m basedpyright </dev/null >"$types_output" 2>&1 &
types_pid=$!

check_types() {
    local status=0
    wait "$types_pid" || status=$?
    cat "$types_output"
    rm -f "$types_output"
    return "$status"
}

phase "ruff format" "$PYTHON" -m ruff format --check .
phase "ruff check" "$PYTHON" -m ruff check .
phase "import-linter" "$PYTHON" -c 'from importlinter.cli import lint_imports_command; lint_imports_command(["--no-logo"])'
phase "size" "$PYTHON" scripts/check_size.py
phase "config reference" "$PYTHON" scripts/config_reference.py --check
# A file stays on one worker, for its tests share what takes long to make. Unit tests are single processes, one per core.
# A functional test has ranks for all cores, but they often wait for one another, or for a time limit: three files at a
# time fill the gaps.
if [ "$fast" -eq 1 ]; then
    phase "pytest unit" run_pytest tests/unit --numprocesses auto --maxprocesses 8 --fast
    phase "basedpyright" check_types
else
    phase "pytest unit" run_pytest tests/unit --numprocesses auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder
    phase "basedpyright" check_types
    phase "pytest functional" run_pytest tests/functional --numprocesses 3 --dist loadfile --no-loadscope-reorder
fi

echo "=== summary"
printf '%s\n' "${summary[@]}"
echo "$closing_line"
exit "$failed"
