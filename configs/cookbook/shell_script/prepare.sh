#!/bin/bash
# Each rank converts every WORLD_SIZE-th file. The variables are the same as in a Python script.
set -euo pipefail  # the first command that fails ends the rank, and with it the job
to=$1
mkdir -p "$to"

count=0
for number in 0 1 2 3 4 5; do                       # in your script, the files to convert
    [ $((number % WORLD_SIZE)) = "$RANK" ] || continue
    seq "$number" 9 | sort -r >"$to/$number.txt"
    count=$((count + 1))
done
echo "shell_script: ok, rank $RANK of $WORLD_SIZE converted $count files"
