#!/bin/sh
# Trains the demo's head as it was trained: demo/train.sh ANSWERS_OR_PROMPTS.jsonl...
#
# The target answers what has no answer yet. Run again, it goes on where it stopped. EVALUATION names
# files whose prompts are never trained on; BIN and OUT may name other folders.
set -eu
cd "$(dirname "$0")/.."
BIN=${BIN:-.venv/bin}
OUT=${OUT:-demo/training}
TARGET=demo/cache/SmolLM2-135M-Instruct.Q4_1.gguf

make "$TARGET"
# shellcheck disable=SC2086  # EVALUATION is a list
"$BIN/eagle3" train data --target "$TARGET" --prompts "$@" ${EVALUATION:+--evaluation $EVALUATION} \
	--long-share 0.2 --long-tokens 1600 --seed 0 --features --bf16 -o "$OUT/data"
"$BIN/eagle3" train head --data "$OUT/data" --ttt-steps 4 --ttt-ramp 0.9 --epochs 3 \
	--batch-tokens 1536 --learning-rate 1e-3 --warmup 0.03 --seed 0 --bf16 -o "$OUT/head"
