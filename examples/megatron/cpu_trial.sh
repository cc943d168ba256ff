#!/usr/bin/env bash
# A small Llama on real text under your clone's pretrain_gpt.py, in FP8, without a GPU: minutes.
#
#   MEGATRON_LM_PATH=<clone of Megatron-LM> examples/megatron/cpu_trial.sh [more arguments of Megatron]
#
# RANKS (1), FP8 (1; 0 is Megatron's own bf16 layers), STEPS (40) and OUTPUT (a temporary folder) are read from the
# environment. Later arguments win:
#   RANKS=2 ... cpu_trial.sh --tensor-model-parallel-size 2 --sequence-parallel --fp8-recipe rowwise
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
: "${MEGATRON_LM_PATH:?is not set. Clone Megatron-LM, check out core_v0.16.1, and set it to the folder}"
[ -f "$MEGATRON_LM_PATH/pretrain_gpt.py" ] || {
    echo "MEGATRON_LM_PATH: expected a clone of Megatron-LM, got $MEGATRON_LM_PATH, which has no pretrain_gpt.py" >&2
    exit 2
}
OUTPUT=${OUTPUT:-$(mktemp -d)}
PYTHON=${PYTHON:-python3}
STEPS=${STEPS:-40}

[ -e "$OUTPUT/train.idx" ] || "$PYTHON" "$here/prepare_data.py" "$OUTPUT"

MODEL=(
    --num-layers 4 --hidden-size 128 --num-attention-heads 4 --group-query-attention --num-query-groups 2
    --ffn-hidden-size 384 --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
    --untie-embeddings-and-output-weights --seq-length 128 --max-position-embeddings 128
    --attention-dropout 0 --hidden-dropout 0
)
DATA=(
    --train-data-path "$OUTPUT/train" --valid-data-path "$OUTPUT/held_out" --data-cache-path "$OUTPUT/cache"
    --tokenizer-type NullTokenizer --vocab-size 257 --num-workers 0
)
TRAINING=(
    --micro-batch-size 4 --global-batch-size 16 --train-iters "$STEPS" --lr 2e-3 --min-lr 2e-3
    --lr-decay-style constant --clip-grad 1.0 --weight-decay 0.1 --adam-beta2 0.95
    --bf16 --use-distributed-optimizer --eval-iters 2 --eval-interval "$STEPS" --log-interval 5
    --tensorboard-dir "$OUTPUT/tensorboard"
)
FP8_ARGUMENTS=(--fp8-format hybrid --fp8-recipe tensorwise --fp8-health-interval 10)
[ "${FP8:-1}" = 1 ] || FP8_ARGUMENTS=()
# What Megatron's own kernels for GPUs would do otherwise.
ON_CPU=(
    --on-cpu --distributed-backend gloo --transformer-impl local --no-gradient-accumulation-fusion
    --no-rope-fusion --no-persist-layer-norm --no-masked-softmax-fusion --no-bias-swiglu-fusion
    --no-bias-dropout-fusion
)

export TORCHDYNAMO_DISABLE=1 CUDA_DEVICE_MAX_CONNECTIONS=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "${RANKS:-1}" \
    -m megatron_patches.pretrain_gpt \
    "${MODEL[@]}" "${DATA[@]}" "${TRAINING[@]}" "${FP8_ARGUMENTS[@]}" "${ON_CPU[@]}" "$@"
