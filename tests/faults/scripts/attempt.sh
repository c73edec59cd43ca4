#!/bin/sh
# A program that is no Python: fails in the first round, succeeds in the next one.
echo "$MASTER_PORT" >> "$WORK/ports"
echo "$RANK $WORLD_SIZE $ELASTICD_ROUND $TORCHELASTIC_RESTART_COUNT $*" >> "$WORK/attempts"
[ "$ELASTICD_ROUND" -ge 2 ]
