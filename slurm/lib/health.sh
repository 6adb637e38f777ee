# shellcheck shell=bash
# Health check of every node before the trainer starts. Bad nodes are excluded by a requeue, a few times
# between two checkpoints: those that Slurm gives instead may be bad, too, for jobs that fail leave them idle.

bapo_probe() {  # group: run probe.py on each of its nodes; it writes FOLDER/NODE.json and FOLDER/verdict
    local group=$1 folder=$BAPO_LOGS/health/$1 nodes flags gpus
    gpus=SLURM_GPUS_PER_NODE_HET_GROUP_$group  # in a heterogeneous job each group has its own
    gpus=${!gpus:-${SLURM_GPUS_PER_NODE:-0}}
    nodes=$(bapo_nodes "$group" | paste -sd,)
    mkdir -p "$folder"
    date +%s >"$folder/start"  # nodes that unpack an image begin minutes apart: their limits count from here
    bapo_srun_flags "$group" probe
    read -ra flags <<<"$BAPO_HEALTH_FLAGS"
    timeout -k 5 "$BAPO_HEALTH_WAIT_S" srun "${bapo_flags[@]}" --ntasks-per-node=1 \
        "--ntasks=$(bapo_nodes "$group" | wc -l)" --overlap \
        bash "$BAPO_SLURM/task.sh" probe "--folder=$folder" "--nodes=$nodes" "--disk=$BAPO_RUN" \
        "--gpus=${gpus##*:}" "--deadline-s=$((BAPO_HEALTH_WAIT_S * 9 / 10))" "${flags[@]}"
}

# Of a group: lines of "node reason", from the verdict, or the nodes without an answer. If several nodes gave
# none at all, the probe could not run (no such interpreter or image, an image that takes too long to unpack):
# a job that left them all out would wait in the queue for ever.
bapo_bad_nodes() {
    local folder=$BAPO_LOGS/health/$1 node
    if [[ -e $folder/verdict ]]; then
        cat "$folder/verdict"
        return
    fi
    if (($(bapo_nodes "$1" | wc -l) > 1)) && ! compgen -G "$folder/*.json" >/dev/null; then
        echo "* no node answered within $BAPO_HEALTH_WAIT_S s: probe-*.log and job.log in $BAPO_LOGS say why"
        return
    fi
    for node in $(bapo_nodes "$1"); do
        [[ -e $folder/$node.json ]] || echo "$node no answer within $BAPO_HEALTH_WAIT_S s"
    done
}

bapo_health() {
    local group bad nodes pid pids=() before progress most=$BAPO_MAX_IDLE again=0
    [[ $BAPO_HEALTH = on && -z $BAPO_SIGNAL ]] || return 0
    for group in $(bapo_groups); do bapo_probe "$group" & pids+=("$!"); done
    for pid in "${pids[@]}"; do
        while kill -0 "$pid" 2>/dev/null; do builtin wait "$pid"; done  # a signal ends a wait early
    done
    [[ -z $BAPO_SIGNAL ]] || return 0
    bad=$(for group in $(bapo_groups); do bapo_bad_nodes "$group"; done)
    if [[ -z $bad ]]; then
        bapo_event nodes_healthy "nodes=$(bapo_all_nodes)"
        return 0
    fi
    bapo_remove_containers  # now, while this job still has the nodes: after the requeue it may get others
    if grep -q '^\*' <<<"$bad"; then
        bapo_stop health "no bad node could be identified" "$bad" 1
        exit 1
    fi
    nodes=$(cut -d' ' -f1 <<<"$bad" | sort -u | paste -sd,)
    if [[ $nodes = *,* && $nodes = "$(bapo_all_nodes | tr ' ' '\n' | sort -u | paste -sd,)" ]]; then
        # On others it would be the same; and where there are none the job would wait in the queue for ever.
        bapo_stop health "every node is bad: the setup, or a limit of the probe, and not the nodes" "$bad" 1
        exit 1
    fi
    before=${bapo_state[excluded]} progress=$(bapo_progress)
    # With one node a wrong setup looks like a bad node: the job would leave out one after the other.
    [[ $(bapo_all_nodes) = *' '* ]] || most=0
    [[ -z $before ]] || ((progress > bapo_state[excluded_at])) || again=$((bapo_state[health_idle] + 1))
    if ((again > most)); then
        bapo_stop health "nodes $before were left out before; others are bad now" "$bad" 1
        exit 1
    fi
    bapo_event nodes_excluded "nodes=$nodes" "cause=$bad"
    bapo_say "requeue without bad nodes:"$'\n'"$bad"
    bapo_write_state "excluded=${before:+$before,}$nodes" "excluded_at=$progress" \
        "health=$((bapo_state[health] + 1))" "health_idle=$again" status=requeued
    bapo_requeue "$nodes"
    bapo_stop health "scontrol requeue failed" "$bad" 1
    exit 1
}
