# shellcheck shell=bash
# Nodes of a job: host lists, rendezvous address and ports, srun's flags; and questions to Slurm.

# A user's defaults of Slurm's commands would change their answers: with SQUEUE_STATES=PENDING, no job runs.
unset "${!SQUEUE_@}" "${!SINFO_@}" "${!SCANCEL_@}"

# sbatch hands on the variables of the job that it was called in: by `checkpoint.after_export`, or in a shell
# of `salloc`. A job would take the groups and the nodes of the other for its own, and Slurm 24.11 refuses two
# different numbers of cores.
bapo_forget_other_job() {
    local name cores
    if [[ ${SLURM_JOB_ID_HET_GROUP_0:-${SLURM_JOB_ID:-}} != "${SLURM_JOB_ID:-}" ]]; then
        for name in "${!SLURM_@}"; do
            [[ $name != *_HET_GROUP_* && $name != SLURM_HET_SIZE ]] || unset "$name"
        done
    fi
    cores=$(sed -n 's/.*cpu[=:]\([0-9][0-9]*\).*/\1/p' <<<"${SLURM_TRES_PER_TASK:-}")
    [[ -z $cores || $cores = "${SLURM_CPUS_PER_TASK:-$cores}" ]] || unset SLURM_TRES_PER_TASK
}
bapo_forget_other_job

# Output of a Slurm command. A busy controller refuses for minutes, and no answer must not pass for one: the
# command is tried again, for BAPO_SLURM_WAIT_S; not one that this node lacks. Only the last try may complain.
bapo_ask() {
    local found deadline=$((SECONDS + BAPO_SLURM_WAIT_S))
    while ((SECONDS < deadline)); do
        found=$("$@" 2>/dev/null) && { echo "$found"; return 0; }
        (($? != 127)) || break
        sleep 2
    done
    "$@"
}

bapo_nodes() {  # of a group of a heterogeneous job, or of the job
    local name=SLURM_JOB_NODELIST_HET_GROUP_$1
    scontrol show hostnames "${!name:-$SLURM_JOB_NODELIST}"
}

bapo_groups() { if ((${SLURM_HET_SIZE:-1} > 1)); then seq 0 $((SLURM_HET_SIZE - 1)); else echo 0; fi; }

bapo_all_nodes() {  # in one line
    local group
    for group in $(bapo_groups); do bapo_nodes "$group"; done | paste -sd' '
}

bapo_components() {  # job ids
    local group name
    for group in $(bapo_groups); do
        name=SLURM_JOB_ID_HET_GROUP_$group
        echo "${!name:-$SLURM_JOB_ID}"
    done
}

bapo_rendezvous() {
    MASTER_ADDR=$(bapo_nodes 0 | head -n 1)
    # Jobs that share a node must not meet at one port, nor a job the remains of its last start.
    MASTER_PORT=$((20000 + (SLURM_JOB_ID + BAPO_RESTART % 2 * 5000) % 10000))
    BAPO_FIRST_PORT=$((10000 + SLURM_JOB_ID % 1000 * 8))  # of the servers of a rollout node
    export MASTER_ADDR MASTER_PORT BAPO_FIRST_PORT
}

# Nodes of the trainer that failed in this start: those that are down, and those whose failure srun reported,
# which may be up again.
bapo_lost_nodes() {
    local nodes failed
    nodes=$(bapo_nodes 0 | paste -sd,)
    failed=$(sed -n 's/^srun: error: Node failure on \([^ ]*[^ .]\).*/\1/p' "$BAPO_LOGS/job.log" 2>/dev/null |
        paste -sd,)
    {
        bapo_ask sinfo -a -h -N -n "$nodes" -t down,fail -o %N | grep .
        [[ -z $failed ]] || comm -12 <(bapo_nodes 0 | sort) <(scontrol show hostnames "$failed" | sort)
    } | sort -u
}

# END LIMIT of the job: its end in seconds since 1970, 0 if it has none, or Slurm does not say; and its time
# limit, as Slurm writes it. The arguments: how Slurm is asked, `bapo_ask` or `timeout`.
bapo_end_time() {
    local end limit
    # An hour of the autumn is there twice in local time; a user's own format of times may lack the day.
    read -r end limit < <(TZ=UTC0 SLURM_TIME_FORMAT=standard "$@" squeue -h -j "$SLURM_JOB_ID" -o '%e %l')
    # No answer: `date -d ""` would be midnight, long past, and the ranks would be told to stop at once.
    end=$(TZ=UTC0 date -d "${end:-@${SLURM_JOB_END_TIME:-0}}" +%s 2>/dev/null) || end=0
    echo "$end $limit"
}

# Whether `scontrol update TimeLimit` has moved the job's end: then tell the ranks, by a file. Only another
# limit counts: Slurm moves the end of a job that it preempts, too. No answer within 10 s: as it was.
bapo_look_at_end() {
    local end limit
    read -r end limit < <(bapo_end_time timeout -k 1 10 2>/dev/null)
    [[ -n $limit && $limit != "$BAPO_LIMIT" ]] || return 0
    echo "$end $limit" >"$BAPO_LOGS/.$BAPO_JOB_END_FILE.tmp" &&
        mv "$BAPO_LOGS/.$BAPO_JOB_END_FILE.tmp" "$BAPO_LOGS/$BAPO_JOB_END_FILE"
}

bapo_heed_end() {  # take over the end that bapo_look_at_end has found
    local end limit
    read -r end limit 2>/dev/null <"$BAPO_LOGS/$BAPO_JOB_END_FILE" || return 0
    [[ $limit != "$BAPO_LIMIT" && $end =~ ^(0|[1-9][0-9]{0,14})$ ]] || return 0
    BAPO_END=$end BAPO_LIMIT=$limit
    bapo_write_state "end=$end"
    bapo_event job_end_moved "end=$end" "time_limit=$limit"
}

# Flags for srun in $bapo_flags: a group of the job, in the container if there is one. --wait ends ranks that
# hang after another has died; a rank that fails does not end those that still save.
bapo_srun_flags() {  # group, role
    bapo_flags=(--kill-on-bad-exit=0 --open-mode=append "--output=$BAPO_LOGS/$2-%N-%t.log")
    # Slurm would bind each task to as few cores as it can; sampler and reward workers need the others.
    # Tasks need this shell's variables, also where jobs begin without the user's (SLURM_EXPORT_ENV=NONE).
    bapo_flags+=("--chdir=$BAPO_ROOT" --cpu-bind=none --export=ALL)
    ((${SLURM_HET_SIZE:-1} > 1)) && bapo_flags+=("--het-group=$1")
    if [[ $2 = rollout ]]; then bapo_flags+=(--wait=0 --no-kill); else bapo_flags+=("--wait=$BAPO_WAIT_S"); fi
    # Ranks of a node are neighbours: a site's or a user's other order would spread a tensor group over nodes.
    [[ $2 != trainer ]] || bapo_flags+=(--distribution=block)
    [[ -n $BAPO_CONTAINER ]] || return 0
    bapo_flags+=("--container-image=$BAPO_CONTAINER" "--container-workdir=$BAPO_ROOT")
    # Named, so that the steps of one start share it: the probe unpacks the image, the ranks start at once.
    [[ -z $BAPO_CONTAINER_NAME ]] || bapo_flags+=("--container-name=$BAPO_CONTAINER_NAME")
    [[ -z $BAPO_MOUNTS ]] || bapo_flags+=("--container-mounts=$BAPO_MOUNTS")
}

# pyxis keeps a named container on its node, unless the site gives it the scope of a job. Not in the last
# minutes before the end of the job, which are for the requeue. So the next start removes those of the starts
# before it, also of those that Slurm killed: each is as large as the image.
bapo_remove_containers() {  # [old]: this start's, or those of earlier starts
    local group flags=() own=pyxis_$BAPO_CONTAINER_NAME command
    command=(enroot remove -f "$own")
    [[ ${1:-} != old ]] || command=(bash -c "enroot list | grep '^pyxis_bapo-$SLURM_JOB_ID-' |
        grep -vxF $own | xargs -rn 1 enroot remove -f")
    [[ -n $BAPO_CONTAINER && -n $BAPO_CONTAINER_NAME ]] || return 0
    ((BAPO_END == 0 || $(date +%s) < BAPO_END - 180)) || return 0
    for group in $(bapo_groups); do
        flags=(--overlap --ntasks-per-node=1 "--ntasks=$(bapo_nodes "$group" | wc -l)" --output=/dev/null)
        ((${SLURM_HET_SIZE:-1} > 1)) && flags+=("--het-group=$group")
        timeout -k 5 60 srun "${flags[@]}" "${command[@]}" 2>/dev/null
    done
    return 0
}
