#!/usr/bin/env bash
# What one GPU can say about titanlite in 570 seconds. Each block is in its file before the next one begins, so that a
# cut-off keeps what was measured. Installs nothing; torch 2.11 or newer.
#
#   scripts/bench/gpu_session.sh [FOLDER]      default: outputs/gpu_session
set -u
cd "$(dirname "$0")/../.."
folder="${1:-outputs/gpu_session}" number=0
mkdir -p "$folder"
unset TRITON_INTERPRET
export PYTHONPATH="$PWD" PYTHONUNBUFFERED=1
end=$((SECONDS + 570))

# block SECONDS NAME COMMAND...: at most so long, and never beyond the end.
block() {
    local limit="$1" name="$2" file left=$((end - SECONDS)) code=0
    shift 2
    number=$((number + 1))
    file="$folder/$(printf %02d "$number")_$name.txt"
    [ "$limit" -le "$left" ] || limit="$left"
    if [ "$limit" -le 5 ]; then
        echo "no time was left" >"$file"
        return
    fi
    timeout -k 3 "$limit" "$@" >"$file" 2>&1 || code=$?
    echo "exit code $code, limit $limit s" >>"$file"
    sync "$file"
    echo "$file: exit code $code, $((end - SECONDS)) s left"
}

bench=scripts/bench
block 30 machine python -c "
import sys
sys.path.insert(0, '$bench')
from gpu_common import CudaTimer, inspect_machine, missing_gpu
sys.exit(missing_gpu()) if missing_gpu() else print(inspect_machine(CudaTimer(0.2)).describe())"
# Right on hardware: values against float64, and the same bits in every run.
block 70 right python -m pytest -q -p no:cacheprovider -m gpu -k "fused or added or delta or residual or rotation or gate" \
    tests/functional/test_gpu.py tests/unit/ops/test_elementwise_kernels.py tests/unit/ops/test_gated_delta.py
# The fused kernels beside what they replace.
block 50 fused python $bench/fused_gpu.py
# Steps with and without recomputation, compiled, beside transformers' model.
block 80 steps python $bench/train_gpu.py --quick --budget-s 70 --out "$folder"
# One and two sequences per micro-batch, recomputed: is the host, or the device, the slower?
block 30 one_sequence python $bench/train_gpu.py --sequences 1 --only "triton, checkpointing full, causal" --out "$folder/1"
block 30 two_sequences python $bench/train_gpu.py --sequences 2 --only "triton, checkpointing full, causal" --out "$folder/2"
# Operators of a step beside what \`plan\` expects: corrects the rates.
block 60 operators python $bench/step_gpu.py --out "$folder"
# Which kernel of attention, can a micro-batch be a graph, what does an exchange take?
block 40 attention python $bench/probes_gpu.py attention
block 35 graph python $bench/probes_gpu.py graph
block 20 exchange python $bench/probes_gpu.py exchange
# Published, tokens/s on one H100: 8,429; 5,172.
block 40 lora_qwen3_8b python $bench/lora_gpu.py --family qwen3 --preset 8B
block 45 lora_gpt_oss_20b python $bench/lora_gpu.py --family gpt_oss --preset 20B --checkpointing full
block 40 experts python $bench/moe_gpu.py --quick --budget-s 35 --out "$folder"
