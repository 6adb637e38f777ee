# shellcheck shell=bash
# Requeue decision of a job. Each kind of end has a budget; an end without a newer checkpoint is a crash loop,
# and stops the job.

bapo_budget() {  # of a kind of end
    case $1 in
        crash | engines) echo "$BAPO_MAX_CRASHES" ;;
        preemption) echo "$BAPO_MAX_PREEMPTIONS" ;;
        time_limit) echo "$BAPO_MAX_TIME_LIMITS" ;;
        node | storage) echo "$BAPO_MAX_NODE_FAILURES" ;;
    esac
}

bapo_near_the_end() {
    # Slurm moves the end of a job that it preempts, so this compares with the planned end.
    ((BAPO_END > 0 && $(date +%s) >= BAPO_END - BAPO_LEAD_S - 90)) && return 0
    # Ranks whose updates and saves are long stop earlier by themselves. As preemptions, of which fewer are
    # allowed, a run on a queue of short jobs would stop within the month.
    grep -qs "^stopped: the job's time would end" "$BAPO_LOGS"/trainer-*-0.log
}

bapo_lacks_engines() { ((BAPO_EXPECTED > 0 && $(bapo_engines_alive | wc -l) < BAPO_EXPECTED)); }

# The kind of the trainer's end, from its exit code: finished, cancelled, slurm (which requeues by itself),
# config, stopped, or a kind with a budget. Order matters: a cancelled job and a lost node explain any exit
# code of the ranks, so they are checked before the code.
bapo_kind_of_end() {
    local code=$1
    if ((code == 0)); then echo finished
    elif [[ -e $BAPO_RUN/$BAPO_STOP_FILE ]]; then echo cancelled
    elif ! bapo_is_running; then echo slurm
    elif [[ -n $(bapo_lost_nodes) ]]; then echo node
    elif [[ -n $BAPO_NO_ENGINES ]]; then echo engines
    elif ((code == 85)) || [[ -n $BAPO_SIGNAL ]]; then
        if bapo_near_the_end; then echo time_limit; else echo preemption; fi
    elif ((code == 2)); then echo config
    elif ((code == 3)); then
        if bapo_lacks_engines; then echo engines; else echo stopped; fi
    elif ((code == 4)); then echo storage
    elif bapo_loses_a_node; then echo node
    else echo crash
    fi
}

# Ranks of a failed node may end before Slurm reports the node as down. If srun could not end its tasks, their
# node may be dead, which Slurm reports only after its SlurmdTimeout.
bapo_loses_a_node() {
    local looks=10 pause=1 limit_s
    if grep -q '^srun: error: Timed out waiting for job step to complete' "$BAPO_LOGS/job.log" 2>/dev/null
    then
        limit_s=$(scontrol show config 2>/dev/null | sed -n 's/^SlurmdTimeout *= *\([1-9][0-9]*\) .*/\1/p')
        pause=5 looks=$(((${limit_s:-300} + 60) / 5))
    fi
    while ((looks-- > 0)); do
        # Not into the last minute of the job, which is for the requeue.
        ((BAPO_END == 0 || $(date +%s) < BAPO_END - 60)) || return 1
        sleep "$pause"
        [[ -n $(bapo_lost_nodes) ]] && return 0
    done
    return 1
}

# Whether the run did not cause this kind of end: then a few requeues need no newer checkpoint.
# A time limit is the run's fault unless its ranks ended with 85: those had nothing newer to save, and the
# write-ahead log keeps what was sampled. Ranks that could not save in time would fail again.
bapo_is_blameless() {  # kind, exit code
    case $1 in
        preemption | node | storage) return 0 ;;
        time_limit) (($2 == 85)) ;;
        *) return 1 ;;
    esac
}

# Whether a job that ended so may be requeued. Counts this end; prints the reason if not.
bapo_may_requeue() {  # kind, exit code
    local kind=$1 code=${2:-1} progress count budget
    progress=$(bapo_progress) count=$((${bapo_state[$kind]} + 1)) budget=$(bapo_budget "$kind")
    if ((count > budget)); then
        echo "$kind number $count, and the budget is $budget"
        return 1
    fi
    if ((progress > bapo_state[progress])); then
        bapo_write_state "$kind=$count" idle=0 "progress=$progress"
        return 0
    fi
    # A few such ends are allowed before the next checkpoint.
    if bapo_is_blameless "$kind" "$code" && ((bapo_state[idle] < BAPO_MAX_IDLE)); then
        bapo_write_state "$kind=$count" "idle=$((bapo_state[idle] + 1))"
        return 0
    fi
    echo "$kind, and no newer checkpoint than step $((progress / 1000000)) since the last requeue"
    return 1
}

bapo_excluded() {  # job id, nodes: with those that the job leaves out already (sbatch --exclude)
    local before
    before=$(scontrol show job -o "$1" 2>/dev/null | sed -n "s/^JobId=$1 .* ExcNodeList=\([^ ]*\).*/\1/p")
    [[ $before != "(null)" ]] || before=
    echo "${before:+$before,}$2"
}

# Requeue this job, without the given nodes. Slurm then kills this shell. TERM is ignored meanwhile: nodes can
# be excluded only after the requeue, while the job is pending.
bapo_requeue() {
    local excluded=${1:-} id
    trap '' TERM USR1
    (
        bapo_ask scontrol requeue "$SLURM_JOB_ID" || exit 1
        [[ -n $excluded ]] || exit 0
        for id in $(bapo_components); do
            for _ in 1 2 3 4 5; do  # the job must be pending first
                scontrol update "JobId=$id" "ExcNodeList=$(bapo_excluded "$id" "$excluded")" && break
                sleep 0.5
            done
        done
    ) || return 1
    while :; do sleep 5 & builtin wait $!; done
}

# RUNNING, too, if Slurm does not answer: this shell lives, so that its job is not over.
bapo_job_state() { { bapo_ask squeue -h -j "$SLURM_JOB_ID" -o %T || echo RUNNING; } | head -n 1; }

bapo_is_running() { bapo_is_live "$(bapo_job_state)"; }

# STATE: of a job that runs, also while Slurm stops, continues (before it preempts) or shrinks it.
bapo_is_live() {
    [[ $1 =~ ^(RUNNING|SIGNALING|STOPPED|SUSPENDED|RESIZING|CONFIGURING)$ ]]
}

# End the job after the trainer has ended with CODE: requeue or stop. Does not return for a requeued job.
bapo_finish() {
    local code=$1 kind step why cause
    # Nobody is left to tell. Slurm signals the subshells below, too: without their answer a job that it takes
    # back itself would be declared as stopped.
    trap '' TERM USR1
    kind=$(bapo_kind_of_end "$code") step=$(bapo_checkpoint_step)
    BAPO_TRAINER=''
    case $kind in
        finished)
            bapo_event job_done "step=$step"
            bapo_write_state status=done
            bapo_say "done"
            return 0 ;;
        cancelled)
            bapo_event job_cancelled "step=$step"
            bapo_write_state status=cancelled
            bapo_say "stopped on request; the last checkpoint is of step $step"
            rm -f "$BAPO_RUN/$BAPO_STOP_FILE"
            return 0 ;;
        slurm)
            bapo_say "the job is $(bapo_job_state) for Slurm, which decides what comes now"
            return "$code" ;;
    esac
    cause=$(bapo_cause)
    if [[ $kind = config || $kind = stopped ]]; then
        why="exit code $code: a restart would not help"
    elif why=$(bapo_may_requeue "$kind" "$code"); then
        bapo_read_state  # the subshell above wrote it
        bapo_event job_requeue "reason=$kind" "count=${bapo_state[$kind]}" "step=$step" "exit_code=$code" \
            "cause=$cause"
        bapo_write_state status=requeued  # before the requeue, which kills this shell at any line
        bapo_say "trainer ended with $code ($kind), checkpoint of step $step; $cause"
        bapo_say "requeue number ${bapo_state[$kind]} of its kind"
        bapo_requeue "" || why="scontrol requeue failed"
    fi
    bapo_stop "$kind" "$why" "$cause" "$code"
    return "$code"
}

bapo_stop() {  # kind, why it is not requeued, cause, exit code: end the job for good
    bapo_event job_stopped "reason=$1" "why=$2" "cause=$3" "exit_code=$4" "step=$(bapo_checkpoint_step)"
    bapo_write_state status=stopped
    bapo_headline "STOPPED: $1: $2
cause: $3
exit code $4; last checkpoint: step $(bapo_checkpoint_step); restarts: $BAPO_RESTART"
}
