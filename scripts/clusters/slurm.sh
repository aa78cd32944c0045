#!/usr/bin/env bash
# Trains on the nodes of a SLURM job: one launcher per node, and another job in the queue when the time limit comes.
#
#   sbatch --nodes=4 scripts/clusters/slurm.sh --config configs/recipes/qwen3_30b_a3b_sft.toml [--section.key=value ...]
#
# Submit it from the checkout, which must lie on a file system that all nodes share, as job.dump_folder must. Options of
# sbatch on the command line come before those below. Variables that can be set before: TITANLITE_ROOT (the checkout, if
# it is not the current folder), MAX_RESTARTS, RDZV_PORT, RDZV_CONF, NGPU. docs/many_nodes.md explains the rest.

#SBATCH --job-name=titanlite
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
# A job that goes on after a lost node or the time limit keeps its number and its log.
#SBATCH --requeue
#SBATCH --open-mode=append
# This script, not the ranks, gets SIGUSR1 so many seconds before the limit: time for the longest step and a checkpoint,
# of which that of a model of 235 B parameters is 3.3 TB, 11 minutes at 5 GB/s. With a shorter --time it comes at once.
#SBATCH --signal=B:USR1@1800

set -euo pipefail

requeue=0
interrupted=0
# SIGTERM makes every launcher finish its step, save and end with exit code 0; srun, whose process is `$!` once it is
# started, passes it on to all of them.
stop() {
    echo "slurm.sh: $1: asking the run to save and end"
    interrupted=1
    kill -TERM "${!:-}" 2>/dev/null || exit 143
}
trap 'requeue=1; stop "the time limit is near"' USR1
trap 'stop "SIGTERM"' TERM

root="${TITANLITE_ROOT:-${SLURM_SUBMIT_DIR:?start it with: sbatch --nodes=N scripts/clusters/slurm.sh --config ...}}"
# The launchers meet on the first node. Jobs that share a node need different ports.
hosts="$(scontrol show hostnames "$SLURM_JOB_NODELIST")"
export NNODES="$SLURM_JOB_NUM_NODES"
export RDZV_ENDPOINT="${hosts%%$'\n'*}:${RDZV_PORT:-$((20000 + SLURM_JOB_ID % 10000))}"
export RDZV_ID="slurm-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"
export MAX_RESTARTS="${MAX_RESTARTS:-3}"
if [ -z "${NGPU:-}" ] && [ -n "${SLURM_GPUS_ON_NODE:-}" ]; then export NGPU="$SLURM_GPUS_ON_NODE"; fi
# Left over from an interactive session, these would ask for machines with fixed numbers.
unset NODE_RANK MASTER_ADDR MASTER_PORT

# Makes or finds the Python environment once, before all nodes ask for it.
python="$("$root/scripts/setup_env.sh")"
checkpoints="$(PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" "$python" - "$@" <<'PY'
import sys

from titanlite.config import load_config

sys.tracebacklimit = 0
job = load_config(sys.argv[1:])
print(f"{job.job.dump_folder}/{job.checkpoint.folder}")
PY
)" || exit 2
start="$(mktemp)"

echo "slurm.sh: job $SLURM_JOB_ID on $NNODES nodes, rendezvous $RDZV_ENDPOINT, start ${SLURM_RESTART_COUNT:-0}"
# One launcher that fails ends the others: they would wait for it. One that ends well may upload for longer. srun of
# SLURM 22.05 to 23.02 does not take over the job's --cpus-per-task: each launcher would have one core for all ranks.
srun --nodes="$NNODES" --ntasks="$NNODES" --ntasks-per-node=1 --kill-on-bad-exit=1 --wait=0 \
    ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} "$root/run_train.sh" "$@" &
srun_pid=$!
# A signal ends the wait, not srun: wait again for its exit code.
while
    interrupted=0
    code=0
    wait "$srun_pid" || code=$?
    [ "$interrupted" -eq 1 ]
do :; done

if [ "$code" -ne 0 ]; then
    echo "slurm.sh: the run ended with exit code $code" >&2
elif [ "$requeue" -eq 1 ] && [ -z "$(find "$checkpoints" -name manifest.json -newer "$start" 2>/dev/null)" ]; then
    # Put back into the queue, the same job would save nothing again, forever.
    echo "slurm.sh: nothing was saved before the time limit; the job is not put back into the queue. Raise --time, or" \
        "let the signal come later: sbatch --signal=B:USR1@SECONDS ..." >&2
    code=2
elif [ "$requeue" -eq 1 ]; then
    echo "slurm.sh: saved; putting job $SLURM_JOB_ID back into the queue, where it goes on from the checkpoint"
    scontrol requeue "$SLURM_JOB_ID"
fi
rm -f "$start"
exit "$code"
