#!/usr/bin/env bash
# Llama-3-8B on 8 GPUs with 80 GB or more, in FP8, under your clone's pretrain_gpt.py.
#
#   MEGATRON_LM_PATH=<clone> TOKENIZER=<folder of the tokenizer> DATA=<prefix of .bin/.idx> OUTPUT=<folder> \
#       examples/megatron/llama3_8b_8gpus.sh [more arguments of Megatron]
#
# ENGINE=te (default): Transformer Engine's FP8 linears. ENGINE=fp8_ds: those of fp8_ds, where there is none.
# ATTENTION (fa3; fa3_fp8 from about 32k tokens; none is Megatron's own): needs FlashAttention-3, see docs/attention.md.
# STATES=1: Adam's moments and masters in FP8 and bf16 + 8 bits: 5 instead of 14 bytes a parameter (docs/megatron.md).
# It is 1 with ENGINE=fp8_ds, else 0: without Transformer Engine and Apex, Megatron's own optimizer cannot resume.
set -euo pipefail
: "${MEGATRON_LM_PATH:?is not set. Clone Megatron-LM, check out core_v0.16.1, and set it to the folder}"
: "${TOKENIZER:?is not set. It is the folder, or the name, of a Hugging Face tokenizer}"
: "${DATA:?is not set. It is the prefix of what tools/preprocess_data.py wrote}"
: "${OUTPUT:?is not set. Checkpoints and TensorBoard go there}"
PYTHON=${PYTHON:-python3}
GPUS=${GPUS:-8}

MODEL=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --kv-channels 128 --swiglu --normalization RMSNorm
    --position-embedding-type rope --rotary-base 500000 --disable-bias-linear --untie-embeddings-and-output-weights
    --seq-length 8192 --max-position-embeddings 8192 --attention-dropout 0 --hidden-dropout 0 --norm-epsilon 1e-5
)
INPUT=(
    --data-path "$DATA" --data-cache-path "$OUTPUT/cache" --split 998,2,0
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER"
)
TRAINING=(
    --micro-batch-size 1 --global-batch-size 128 --train-iters 100000 --lr 3e-4 --min-lr 3e-5
    --lr-decay-style cosine --lr-warmup-iters 2000 --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95
    --bf16 --eval-iters 16 --eval-interval 1000
)
PARALLEL=(
    --tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer
    --overlap-grad-reduce --overlap-param-gather
)
case ${ENGINE:-te} in
    te) FP8=(--transformer-impl transformer_engine --fp8-format hybrid --fp8-recipe tensorwise) ;;
    fp8_ds) FP8=(
        --transformer-impl local --fp8-format hybrid --fp8-recipe tensorwise --fp8-health-interval 100
        --no-rope-fusion --no-persist-layer-norm
    ) ;;
    *) echo "ENGINE: expected te or fp8_ds, got ${ENGINE}." >&2; exit 2 ;;
esac
# Linears of fp8_ds do not have it, and Megatron's head wants Apex for it, beside Transformer Engine, too.
if [ "${ENGINE:-te}" = fp8_ds ] || ! "$PYTHON" -c "import torch, fused_weight_gradient_mlp_cuda" 2> /dev/null; then
    FP8+=(--no-gradient-accumulation-fusion)
fi
[ "${ATTENTION:-fa3}" = none ] || FP8+=(--fp8-attention-backend "${ATTENTION:-fa3}")
[ "${STATES:-$([ "${ENGINE:-te}" = fp8_ds ] && echo 1 || echo 0)}" = 0 ] || FP8+=(--fp8-optimizer-states)
LOGGING=(
    --log-interval 10 --log-throughput --tensorboard-dir "$OUTPUT/tensorboard"
    --save "$OUTPUT/checkpoints" --load "$OUTPUT/checkpoints" --save-interval 1000 --ckpt-format torch_dist
)

export CUDA_DEVICE_MAX_CONNECTIONS=1
exec "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$GPUS" \
    -m megatron_patches.pretrain_gpt \
    "${MODEL[@]}" "${INPUT[@]}" "${TRAINING[@]}" "${PARALLEL[@]}" "${FP8[@]}" "${LOGGING[@]}" "$@"
