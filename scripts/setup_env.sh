#!/usr/bin/env bash
# Finds or makes a Python that can run titanlite: the current python3 if it has all dependencies, else .venv.
#
#   source scripts/setup_env.sh && setup_env [dev]    sets PYTHON and puts this checkout first in PYTHONPATH
#   scripts/setup_env.sh [dev]                        does the same and prints the path of that interpreter
#
# Made for many calls: with everything in place it takes a fraction of a second and prints nothing.

TITANLITE_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

say() { echo "titanlite: $*" >&2; }

# True if interpreter $1 has every dependency (and those of extra $2, if given) in a version that pyproject.toml allows.
# Looks at metadata only: a real import of torch takes 3 s.
has_dependencies() {
    "$1" - "$TITANLITE_ROOT/pyproject.toml" "$2" 2>/dev/null <<'PY'
import re
import sys

if sys.version_info < (3, 11):
    sys.exit(1)

import importlib.util
import tomllib
from importlib import metadata

MODULES = {"import-linter": "importlinter"}


def numbers(version):
    return [int(n) for n in re.findall(r"\d+", version.split("+")[0])[:3]]


def fits(requirement):
    spec, _, marker = requirement.partition(";")
    if "Linux" in marker and sys.platform != "linux":
        return True
    name, _, minimum = spec.strip().partition(">=")
    if importlib.util.find_spec(MODULES.get(name, name)) is None:
        return False
    try:
        return numbers(metadata.version(name)) >= numbers(minimum)
    except metadata.PackageNotFoundError:  # importable from a plain folder: no version to compare
        return True


with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
extra = project["optional-dependencies"][sys.argv[2]] if sys.argv[2] else []
sys.exit(0 if all(fits(requirement) for requirement in project["dependencies"] + extra) else 1)
PY
}

# Prints the first interpreter that is Python 3.11 or newer.
find_python() {
    local candidate
    for candidate in python3 python3.13 python3.12 python3.11 python3.14 python; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            echo "$candidate"
            return 0
        fi
    done
    say "no Python 3.11 or newer: found $(python3 --version 2>/dev/null || echo 'no python3') on PATH." \
        "Install Python 3.11 or newer, or activate an environment that has it."
    return 1
}

# Runs "$@" with its output appended to the log; on failure shows the log's last lines.
run_logged() {
    local log="$TITANLITE_ROOT/.venv/setup.log"
    if ! "$@" >>"$log" 2>&1 </dev/null; then
        say "this command failed: $*"
        tail -n 20 "$log" | sed 's/^/    /' >&2
        say "the whole log is in $log. Mend the cause and run the same command again."
        return 1
    fi
}

# Builds or updates .venv; $1 is '' or 'dev'. The caller holds the lock.
build_venv() {
    local extra="$1" venv="$TITANLITE_ROOT/.venv" python
    python="$(find_python)" || return 1
    : >"$venv/setup.log"
    # A build that was cut off may have left half a package, which pip cannot repair: start from nothing.
    if [ -e "$venv/.incomplete" ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        say "creating .venv with $("$python" --version) (first run, about 1 to 3 minutes) ..."
        find "$venv" -mindepth 1 -maxdepth 1 ! -name .lock ! -name setup.log -exec rm -rf {} +
        : >"$venv/.incomplete"
        run_logged "$python" -m venv "$venv" || return 1
    else
        say "updating .venv (pyproject.toml, constraints.txt or the wanted tools changed) ..."
        : >"$venv/.incomplete"
    fi
    say "installing titanlite and its dependencies${extra:+ with the $extra tools} ..."
    run_logged "$venv/bin/python" -m pip install --disable-pip-version-check \
        -c "$TITANLITE_ROOT/constraints.txt" -e "$TITANLITE_ROOT${extra:+[$extra]}" || return 1
    rm -f "$venv/.incomplete"
}

# True if .venv/stamp says that .venv was built for hash $1 and extra $2; the dev tools include all that training needs.
is_built() {
    local stamp
    stamp="$(cat "$TITANLITE_ROOT/.venv/stamp" 2>/dev/null || true)"
    [ "$stamp" = "$1 dev" ] || [ "$stamp" = "$1 $2" ]
}

# Makes .venv fit for extra $1 if it is not, one process at a time.
ensure_venv() {
    local extra="$1" venv="$TITANLITE_ROOT/.venv" hash
    hash="$( (cd "$TITANLITE_ROOT" && pwd && cat pyproject.toml constraints.txt) | cksum)"
    if is_built "$hash" "$extra"; then return 0; fi
    mkdir -p "$venv" || return 1
    exec 9>"$venv/.lock" || return 1
    if command -v flock >/dev/null && ! flock -n 9; then
        say "waiting for another process that is setting up .venv ..."
        flock 9
    fi
    if ! is_built "$hash" "$extra"; then
        # Dev tools that are there are kept, in the versions of the new constraints.
        case "$(cat "$venv/stamp" 2>/dev/null || true)" in *" dev") extra=dev ;; esac
        rm -f "$venv/stamp"
        build_venv "$extra" || { exec 9>&-; return 1; }
        echo "$hash $extra" >"$venv/stamp"
    fi
    exec 9>&-
}

setup_env() {
    PYTHON=python3
    if ! has_dependencies "$PYTHON" "${1:-}"; then
        PYTHON="$TITANLITE_ROOT/.venv/bin/python"
        ensure_venv "${1:-}" || return 1
    fi
    # Also with the editable install of .venv: the checkout of this script is the one that runs.
    export PYTHONPATH="$TITANLITE_ROOT${PYTHONPATH:+:$PYTHONPATH}"
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    set -euo pipefail
    setup_env "${1:-}"
    command -v "$PYTHON"
fi
