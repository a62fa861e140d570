#!/bin/bash
# Starts Ray on this node. On rank 0, also the driver, which is the command in the arguments.
set -euo pipefail
port=6379 # not in 10002-19999, where Ray's workers listen
options=(--num-cpus=1 --disable-usage-stats --block)

if [ "$RANK" = 0 ]; then
    ray start --head --port=$port --include-dashboard=false "${options[@]}" &
    trap "kill $!; wait" EXIT
    "$@"
else
    until (: <>"/dev/tcp/$MASTER_ADDR/$port") 2>/dev/null; do sleep 0.2; done # until the head listens
    exec ray start --address="$MASTER_ADDR:$port" "${options[@]}"
fi
