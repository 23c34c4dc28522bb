#!/bin/bash
# A 175B model on 1024 devices.
TP=8
PP=8
LAUNCH_ARGS=(
    --nproc_per_node 8
    --nnodes 128
)
GPT_ARGS=(
    --num-layers 96 --hidden-size 12288
    --num-attention-heads 96
    --seq-length 2048 --max-position-embeddings 2048
    --attention-dropout 0 --hidden-dropout 0
    --vocab-size 50257 --make-vocab-size-divisible-by 128   # padded to 51200 with eight ranks
)
TRAIN_ARGS=(
    --micro-batch-size 1
    --global-batch-size 1536
    --train-samples 146483712
    --lr 6.0e-5 --min-lr 6.0e-6 --lr-decay-style cosine
    --lr-warmup-samples 184320
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95
    --clip-grad 1.0 --fp16 --initial-loss-scale 65536
    --use-distributed-optimizer --overlap-grad-reduce
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --tensor-model-parallel-size ${TP} --pipeline-model-parallel-size ${PP}
    --sequence-parallel --num-layers-per-virtual-pipeline-stage 2
)
DATA_ARGS=(
    --data-path data/corpus_text_document --split 949,50,1
    --tokenizer-type GPT2BPETokenizer
    --save runs/gpt3 --save-interval 1000 --log-interval 10
)
torchrun ${LAUNCH_ARGS[@]} pretrain_gpt.py ${GPT_ARGS[@]} \
    ${TRAIN_ARGS[@]} ${DATA_ARGS[@]}
