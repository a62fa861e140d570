#!/bin/bash
# Runs the job once for each learning rate, one after the other, and lists the runs. Arguments go to each run.
set -euo pipefail
cd "$(dirname "$0")"

for lr in 0.01 0.1; do
    distlaunch run job.yaml --quiet --set name="lr-$lr" "$@" -- --lr "$lr" || echo "lr $lr failed"
done
distlaunch ps -a runs
