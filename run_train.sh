#!/usr/bin/env bash
# Installs what titanlite needs (first call only), checks the configuration, then trains on NGPU ranks.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: ./run_train.sh --config FILE [--section.key=value ...]

  --config FILE           TOML file, for example configs/qwen3_moe.toml; relative to the current folder
  --section.key=value     overrides one setting, for example --training.steps=50; docs/config.md lists all

environment:
  NGPU          ranks on this machine; default: the visible GPUs, or 4 CPU processes without a GPU
  MAX_RESTARTS  how often the ranks are started anew after a failure, from the newest checkpoint; default 0
  NNODES        machines, default 1; with more, start the same command on each and set either
  NODE_RANK       the number of this machine, 0 to NNODES - 1
  MASTER_ADDR     host name or address of machine 0
  MASTER_PORT     a free port there, default 29500
                or, so that machines need no numbers and may be lost and come back (docs/many_nodes.md)
  RDZV_ENDPOINT   HOST:PORT, a free port on one of the machines
  RDZV_ID         a name for this run, the same on all of them; default titanlite
  RDZV_CONF       torchrun's --rdzv-conf, for example join_timeout=1800 (seconds; default 600)
  NNODES          also MIN:MAX: the run begins and goes on with any number of machines in between
TEXT
}

fail() {
    echo "run_train.sh: $*" >&2
    exit 2
}

# Prints how many GPUs this process may use: those of nvidia-smi, less what CUDA_VISIBLE_DEVICES hides.
count_gpus() {
    local all=0 visible=0 entry entries
    if command -v nvidia-smi >/dev/null; then
        all="$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)"
    fi
    if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
        # Numbers or UUIDs; an empty list or a -1 hides every GPU that is not before it.
        IFS=', ' read -ra entries <<<"$CUDA_VISIBLE_DEVICES"
        for entry in ${entries[@]+"${entries[@]}"}; do
            [ "$entry" != -1 ] || break
            [ -z "$entry" ] || visible=$((visible + 1))
        done
        [ "$visible" -ge "$all" ] || all="$visible"
    fi
    echo "$all"
}

is_number() { case "$1" in '' | *[!0-9]*) return 1 ;; esac; }

for argument in "$@"; do
    case "$argument" in -h | --help) usage; exit 0 ;; esac
done
[ "$#" -gt 0 ] || { usage >&2; exit 2; }

gpus="$(count_gpus)"
if [ "$gpus" -gt 0 ]; then NGPU="${NGPU:-$gpus}"; else NGPU="${NGPU:-4}"; fi
NNODES="${NNODES:-1}"
is_number "$NGPU" && [ "$NGPU" -gt 0 ] || fail "NGPU is '$NGPU', not a positive number. Set it to the ranks per machine."
# MIN:MAX or one number; the rendezvous needs both ends.
min_nodes="${NNODES%%:*}" max_nodes="${NNODES#*:}"
is_number "$min_nodes" && is_number "$max_nodes" && [ "$min_nodes" -gt 0 ] && [ "$max_nodes" -ge "$min_nodes" ] ||
    fail "NNODES is '$NNODES', not a positive number or MIN:MAX. Set it to the machines."
MAX_RESTARTS="${MAX_RESTARTS:-0}"
is_number "$MAX_RESTARTS" || fail "MAX_RESTARTS is '$MAX_RESTARTS', not a number. Set it to 0 or more."
if [ "$gpus" -gt 0 ] && [ "$NGPU" -gt "$gpus" ]; then
    fail "NGPU ($NGPU) is more than the visible GPUs ($gpus). Lower it, or set CUDA_VISIBLE_DEVICES= to train on the CPU."
fi
if [ "$max_nodes" -eq 1 ]; then
    rendezvous=(--standalone)
elif [ -n "${RDZV_ENDPOINT:-}" ]; then
    [ -z "${NODE_RANK:-}" ] || fail "NODE_RANK and RDZV_ENDPOINT are both set. Unset NODE_RANK; the rendezvous gives numbers."
    is_number "${RDZV_ENDPOINT##*:}" && [ -n "${RDZV_ENDPOINT%:*}" ] && [ "${RDZV_ENDPOINT%:*}" != "$RDZV_ENDPOINT" ] ||
        fail "RDZV_ENDPOINT is '$RDZV_ENDPOINT'. Set it to HOST:PORT of one of the machines."
    rendezvous=(
        "--nnodes=$NNODES" --rdzv-backend=c10d "--rdzv-endpoint=$RDZV_ENDPOINT" "--rdzv-id=${RDZV_ID:-titanlite}"
    )
    [ -z "${RDZV_CONF:-}" ] || rendezvous+=("--rdzv-conf=$RDZV_CONF")
else
    [ "$min_nodes" -eq "$max_nodes" ] || fail "NNODES is '$NNODES', but RDZV_ENDPOINT is not set. Set it to HOST:PORT."
    [ "$MAX_RESTARTS" -eq 0 ] ||
        fail "MAX_RESTARTS is $MAX_RESTARTS with NNODES=$NNODES, but RDZV_ENDPOINT is not set. Set it to HOST:PORT."
    is_number "${NODE_RANK:-}" && [ "$NODE_RANK" -lt "$NNODES" ] ||
        fail "NODE_RANK is '${NODE_RANK:-}' with NNODES=$NNODES. Set it to 0 to $((NNODES - 1)), different on each machine."
    [ -n "${MASTER_ADDR:-}" ] || fail "MASTER_ADDR is not set, but NNODES is $NNODES. Set it to the host of machine 0."
    rendezvous=(
        "--nnodes=$NNODES" "--node-rank=$NODE_RANK"
        "--master-addr=$MASTER_ADDR" "--master-port=${MASTER_PORT:-29500}"
    )
fi

[ "$MAX_RESTARTS" -eq 0 ] || rendezvous+=("--max-restarts=$MAX_RESTARTS")

source "$(dirname "${BASH_SOURCE[0]}")/scripts/setup_env.sh"
setup_env

# One thread per rank: CPU ranks already fill the cores. Beside a GPU some are free, for a step of offloaded states and
# the like. Set here because torchrun warns when it sets it itself.
threads=1
if [ "$gpus" -gt 0 ]; then
    threads="$(($(nproc) / NGPU))"
    [ "$threads" -ge 1 ] || threads=1
    [ "$threads" -le 8 ] || threads=8
    export TITANLITE_GPUS="$gpus" # ranks refuse to go on without them
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$threads}"

# torch's stores would write 40 lines of C++ about each machine that is gone, around the line that says so.
[ "$max_nodes" -eq 1 ] || export TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-ERROR}"

# Refuses a wrong configuration in a fraction of a second, once, before torch is imported and ranks are started; with
# MIN:MAX machines for every number of ranks that the run may have.
world_sizes="$((NGPU * max_nodes))"
for ((nodes = max_nodes - 1; nodes >= min_nodes; nodes--)); do world_sizes+=",$((NGPU * nodes))"; done
"$PYTHON" -m titanlite.preflight --world-size "$world_sizes" "$@"
exec "$PYTHON" -m titanlite.launch "${rendezvous[@]}" --nproc-per-node="$NGPU" -m titanlite.rank "$@"
