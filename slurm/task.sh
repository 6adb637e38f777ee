#!/usr/bin/env bash
# Entry point of an srun's tasks, in the container if there is one: `task.sh trainer|rollout RECIPE [flags]`,
# `task.sh probe [flags of probe.py]`, or `task.sh command COMMAND [ARGUMENTS]` of a helper job.
set -u
role=$1
shift
# The cluster file's variables once more: in a container those of the image have taken their place.
eval "${BAPO_TASK_SETTINGS:-}"
unset BAPO_TASK_SETTINGS
# A container may lack the user's home, where SGLang and Triton keep what they compile; without it they fail.
# One that is read-only on the nodes is kept without a container: it has `pip install --user`, .netrc.
if ! { mkdir -p "${HOME:-}" && [[ -w $HOME || -z ${BAPO_CONTAINER:-} ]]; } 2>/dev/null; then
    echo "the home ${HOME:-} cannot be written to here: compiled kernels go to a folder of this task in /tmp"
    HOME=$(mktemp -d "/tmp/bapo-home.XXXXXX") || exit 1
    made=$HOME
    trap 'rm -rf "$made"' EXIT
fi
export HOME
if [[ -n ${TMPDIR:-} && ! -w $TMPDIR ]]; then  # a folder of the node, which the container does not mount
    echo "TMPDIR=$TMPDIR cannot be written to here: temporary files go to /tmp"
    unset TMPDIR
fi
. "$BAPO_LIB/settings.sh"
. "$BAPO_LIB/run_paths.sh"
. "$BAPO_LIB/events.sh"
# The code of this checkout, also where a job was not submitted from its root: an image has a copy of its own.
export PYTHONPATH=${BAPO_SLURM%/slurm}${PYTHONPATH:+:$PYTHONPATH}

forward_signal() {  # signal: send it to the rank; before the rank starts there is nothing to save
    # shellcheck disable=SC2046  # a rank that bash has started, and whose pid is not yet in $child
    [[ -n $child ]] || { kill "-$1" $(jobs -p) 2>/dev/null; exit 85; }
    kill "-$1" "$child" 2>/dev/null
}

record_exit() {  # exit code: write it to the job's logs/ended/RANK; report a signal that killed the rank
    local file=$BAPO_LOGS/ended/$RANK words=
    if (($1 > 128)); then
        (($1 != 137)) || words=', most likely because the node had no memory left (dmesg there says so)'
        echo "error: rank $RANK on $SLURMD_NODENAME was killed by SIG$(kill -l "$1")$words"
    fi
    echo "$1" >"$file.tmp" && mv "$file.tmp" "$file"
}

trainer() {  # one rank, on one GPU
    local child='' code
    # Before the rank starts: a signal that found no trap would kill this shell, and orphan the rank.
    trap 'forward_signal USR1' USR1
    trap 'forward_signal TERM' TERM
    export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_STEP_NUM_TASKS
    local urls=()
    if ((BAPO_EXPECTED > 0)); then
        until [[ -s $BAPO_LOGS/engines ]]; do sleep 1 & wait $!; done
        mapfile -t urls <"$BAPO_LOGS/engines"
        urls=(--rollout.engine sglang --rollout.sglang.urls "${urls[@]}")
    fi
    "$BAPO_PYTHON" -m bapo_megatron.cli train "$@" --run-dir "$BAPO_RUN" "${urls[@]}" &
    child=$!
    while kill -0 "$child" 2>/dev/null; do wait "$child"; done  # a signal ends a wait early
    wait "$child"
    code=$?
    # Killed by the signal itself: the rank was still starting, and has nothing to save.
    ((code != 138 && code != 143)) || code=85
    record_exit "$code"  # before the exit: srun's own code is the largest of all ranks, not the first
    exit "$code"
}

run_command() {  # COMMAND [ARGUMENTS]: of a helper job
    local child=''
    trap 'forward_signal TERM' TERM
    "$@" &
    child=$!
    while kill -0 "$child" 2>/dev/null; do wait "$child"; done  # a signal ends a wait early
    wait "$child"
}

is_ready() {  # address, port: whether the server there accepts requests
    local status
    # shellcheck disable=SC2016  # the inner shell expands them
    status=$(timeout 5 bash -c 'exec 3<>"/dev/tcp/$0/$1" &&
        printf "GET /ready HTTP/1.0\r\n\r\n" >&3 && head -n 1 <&3' "$1" "$2" 2>/dev/null)
    [[ $status == *" 200"* ]]
}

# Whether the process is the server at this port, which another program may have taken: it asks for a key, and
# takes that of the file in its environment. A server paused for new weights is not ready, but does so.
takes_key() {  # address, port, process
    local file
    file=$(sed -z -n 's/^BAPO_SGLANG_API_KEY_FILE=//p' "/proc/$3/environ" 2>/dev/null | tr -d '\0')
    timeout 10 "$BAPO_PYTHON" -m bapo_megatron.rollout.engines.sglang.authorization "http://$1:$2" \
        "${file:-$BAPO_RUN/$BAPO_API_KEY_FILE}"
}

register() {  # port, state, most seconds of its start: 0 while the recipe has not been read
    local file=$BAPO_RUN/$BAPO_ENGINES_FOLDER/$SLURMD_NODENAME-$1.json
    printf '{"url": "http://%s:%s", "node": "%s", "job": %s, "state": "%s", "start_s": %s}\n' \
        "$SLURMD_NODENAME" "$1" "$SLURMD_NODENAME" "$SLURM_JOB_ID" "$2" "${3:-0}" >"$file.tmp" &&
        mv "$file.tmp" "$file"
}

start_limit() {  # process: most seconds of a server's start by its recipe, once the process is the server
    sed -z -n 's/^BAPO_SERVER_START_S=\([0-9]\{1,9\}\)$/\1/p' "/proc/$1/environ" 2>/dev/null | tr -d '\0'
}

descendants() {  # process: all that it has started, one a line
    local child
    # shellcheck disable=SC2013  # words, which no line holds together
    for child in $(cat "/proc/$1/task/"*/children 2>/dev/null); do echo "$child"; descendants "$child"; done
}

end_server() {  # process: end a server that hangs, with its schedulers: those that still import outlive it
    local all
    all=$(descendants "$1")
    kill -TERM "$1" 2>/dev/null
    for _ in {1..10}; do kill -0 "$1" 2>/dev/null || break; sleep 1; done
    # shellcheck disable=SC2086  # a word for each process
    kill -KILL "$1" $all 2>/dev/null
}

keep_server() {  # number, recipe and flags: run one server, and restart it whenever it ends or hangs
    local number=$1 pid pause=1 began code longest
    # Another port on each node: nodes may be one machine.
    local port=$((BAPO_FIRST_PORT + SLURM_NODEID * BAPO_SERVERS_PER_NODE + number))
    local at=${host/#0.0.0.0/127.0.0.1}
    # Made by the trainer, which alone sees that a server does nothing (`_tell_task` in sglang/backend.py).
    local hangs=$BAPO_RUN/$BAPO_ENGINES_FOLDER/$SLURMD_NODENAME-$port.hang
    shift
    while :; do
        register "$port" starting
        began=$SECONDS
        longest=''
        "$BAPO_PYTHON" -m bapo_megatron.cli rollout-server "$@" --run-dir "$BAPO_RUN" --host "$host" \
            --port "$port" --rollout.sglang.first-gpu $((number * BAPO_SERVER_GPUS)) &
        pid=$!
        until is_ready "$at" "$port" || ! kill -0 "$pid" 2>/dev/null; do
            if [[ -z $longest ]]; then
                longest=$(start_limit "$pid")
                [[ -z $longest ]] || register "$port" starting "$longest"
            elif ((SECONDS - began >= longest)); then
                echo "error: the server at port $port was not ready in $longest s: it is started again" \
                    "(rollout.sglang.start_minutes, and 10 s for each GB of weights)"
                end_server "$pid"
            fi
            sleep 1
        done
        rm -f "$hangs"  # it was starting
        while kill -0 "$pid" 2>/dev/null; do
            [[ ! -e $hangs ]] || end_server "$pid"
            if takes_key "$at" "$port" "$pid"; then register "$port" ready; fi
            sleep 5
        done
        wait "$pid"
        code=$?
        register "$port" down
        BAPO_TRAINER=other bapo_event server_ended "engine=http://$SLURMD_NODENAME:$port" "exit_code=$code"
        # Exponential backoff of a crash loop, up to a minute; a server that has lived for one starts at once.
        pause=$((SECONDS - began > 60 ? 1 : pause * 2 > 60 ? 60 : pause * 2))
        sleep "$pause"
    done
}

rollout() {  # all servers of one node
    local number host
    host=${BAPO_SERVER_HOST:-$("$BAPO_PYTHON" "$BAPO_SLURM/node_address.py" "$SLURMD_NODENAME")} || exit 1
    mkdir -p "$BAPO_RUN/$BAPO_ENGINES_FOLDER"
    for ((number = 0; number < BAPO_SERVERS_PER_NODE; number++)); do keep_server "$number" "$@" & done
    wait
}

case $role in
    trainer | rollout) "$role" "$@" ;;
    probe) "$BAPO_PYTHON" "$BAPO_SLURM/probe.py" "$@" ;;
    command) run_command "$@" ;;
    *) bapo_refuse "task.sh $role: there are trainer, rollout, probe and command" ;;
esac
