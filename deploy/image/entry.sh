#!/bin/sh
# Process 1 of every container of ours, until it becomes the service.
#   router|cache|prefill|decode [flags]    a service: names itself after its container, and listens on every interface
#   model                                  fetches DIPTYCH_MODEL into the models volume, and notes where it lies
#   anything else                          is run as it is
set -eu

served=$DIPTYCH_CACHE/served
password=/run/diptych/password
allocator=/usr/local/lib/libtcmalloc_minimal.so.4

case ${1:-} in
  model)
    path=$(python -m diptych.engine.fetch "$DIPTYCH_MODEL")
    # A path, not a name: a hub's branch may move between two looks, and all must see the same files.
    printf '%s\n' "$path" >"$served.tmp"
    mv "$served.tmp" "$served"
    echo "$DIPTYCH_MODEL is at $path"
    exit ;;
  router | cache | prefill | decode) role=$1; shift ;;
  *) exec "$@" ;;
esac

# HOSTNAME is the container's id, which the network resolves for as long as the container lives, whatever its address.
export DIPTYCH_WORKER_ID="${DIPTYCH_WORKER_ID:-$role-$HOSTNAME}"
export DIPTYCH_ADVERTISE="${DIPTYCH_ADVERTISE:-$HOSTNAME}"
export DIPTYCH_LISTEN="${DIPTYCH_LISTEN:-0.0.0.0:50051}"
if [ -z "${DIPTYCH_REDIS_URL:-}" ]; then
  export DIPTYCH_REDIS_URL="redis://$role:$(cat $password)@redis:6379/0"
fi

if [ "$role" != cache ]; then
  export DIPTYCH_MODEL_NAME="${DIPTYCH_MODEL_NAME:-$DIPTYCH_MODEL}"
  DIPTYCH_MODEL=$(cat "$served")
  export DIPTYCH_MODEL
fi
if [ "$role" = prefill ] || [ "$role" = decode ]; then
  # A thread that spins while it waits would take its core from the other phase.
  export OMP_NUM_THREADS="${DIPTYCH_THREADS:-1}" OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=0 KMP_BLOCKTIME=0
  [ ! -e $allocator ] || export LD_PRELOAD=$allocator
fi
exec python -m "services.$role" "$@"
