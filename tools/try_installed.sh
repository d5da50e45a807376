#!/bin/sh
# Trains a small model with its states on a drive, with the `infinity` that is in the path.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
cat >config.json <<'CONFIG'
{
  "train_micro_batch_size_per_gpu": 1,
  "bf16": {"enabled": true},
  "zero_optimization": {
    "stage": 3,
    "offload_param": {"device": "nvme", "nvme_path": "swap"},
    "offload_optimizer": {"device": "nvme", "nvme_path": "swap"}
  }
}
CONFIG
mkdir swap
infinity env
infinity train --model gpt2:tiny --config config.json --steps 3 --seq-len 64
[ -z "$(ls swap)" ] || { echo "files are left in the swap directory"; exit 1; }
