# shellcheck shell=bash
# Supervisor of a job: begin, health check, wait for the trainer, requeue or stop. Sourced by every template
# and by the script of `bapo submit`.

BAPO_LIB=$(dirname -- "${BASH_SOURCE[0]}")
for bapo_part in settings run_paths events logs state nodes engines requeue health helpers; do
    # shellcheck source=/dev/null
    . "$BAPO_LIB/$bapo_part.sh"
done

bapo_restart() {  # how often Slurm has started this job again; its variable is unset at the first start
    local found=''
    # A job that was submitted within a requeued job inherits that one's.
    [[ -z ${SLURM_RESTART_COUNT:-} ]] || found=$(scontrol show job -o "${SLURM_JOB_ID:-}" 2>/dev/null |
        sed -n "s/^JobId=${SLURM_JOB_ID:-} .* Restarts=\([0-9][0-9]*\) .*/\1/p")
    echo "${found:-${SLURM_RESTART_COUNT:-0}}"
}

BAPO_RESTART=$(bapo_restart)
BAPO_CONTAINER_NAME=''  # of the probe and the ranks; none: each step unpacks the image for itself
BAPO_SIGNAL=''
BAPO_LIMIT=''  # the job's time limit, as Slurm writes it
BAPO_NO_ENGINES=''
BAPO_TRAINER=''  # pid of its srun, while it runs

bapo_export() {  # what tasks need
    export BAPO_ROOT BAPO_SLURM BAPO_LIB BAPO_PYTHON BAPO_RUN BAPO_RESTART BAPO_END_TIME
    export BAPO_EXPECTED BAPO_SERVERS_PER_NODE BAPO_SERVER_GPUS BAPO_SERVER_HOST
}

bapo_begin() {  # RECIPE [flags of bapo train]
    local recipe=${1:-}
    [[ -n ${SLURM_JOB_ID:-} ]] || bapo_refuse "this is a batch script: start it with sbatch"
    [[ -n $recipe && $recipe != -* ]] || bapo_refuse "usage: sbatch TEMPLATE RECIPE [flags of bapo train]"
    # First: a busy controller may take minutes to answer the questions below.
    trap 'BAPO_SIGNAL=USR1' USR1
    trap 'BAPO_SIGNAL=TERM' TERM
    cd "$BAPO_ROOT" || exit 2
    [[ -f $recipe ]] || bapo_refuse "recipe $recipe does not exist in $BAPO_ROOT"
    bapo_check_numbers
    bapo_check_limits
    bapo_fit_margin
    BAPO_RUN=$(bapo_run_directory "$@")
    BAPO_CONTAINER_NAME=bapo-$SLURM_JOB_ID-$BAPO_RESTART
    bapo_open_logs
    bapo_refuse_second_job
    bapo_load_modules
    bapo_rendezvous
    read -r BAPO_END BAPO_LIMIT < <(bapo_end_time bapo_ask)
    BAPO_END_TIME=$BAPO_END
    BAPO_EXPECTED=${BAPO_ENGINES:-0}
    if [[ -z $BAPO_ENGINES ]] && ((${SLURM_HET_SIZE:-1} > 1)); then
        BAPO_EXPECTED=$(($(bapo_nodes 1 | wc -l) * BAPO_SERVERS_PER_NODE))
    fi
    bapo_export
    ((BAPO_RESTART > 0)) || rm -f "$BAPO_RUN/$BAPO_STOP_FILE"  # of a job that was cancelled
    bapo_account  # first: a job whose budget is spent must not start anything
    # Cancelled, and taken back by Slurm before it had stopped: it would train on to its next end.
    [[ ! -e $BAPO_RUN/$BAPO_STOP_FILE ]] || { bapo_finish 85; exit; }
    bapo_forget_engines  # before servers start: an old entry would count as one of them
    # Before the health check, which takes minutes: a signal during it is noted, and the job ends with 85.
    trap 'bapo_told USR1' USR1
    trap 'bapo_told TERM' TERM
    [[ -z $BAPO_SIGNAL ]] || bapo_told "$BAPO_SIGNAL"  # noted above
    ((BAPO_RESTART == 0)) || bapo_remove_containers old  # before the probe, which unpacks the image
    bapo_health
    [[ -z $BAPO_SIGNAL ]] || { bapo_finish 85; exit 85; }  # before anything ran
}

# Refuse a second job of a run before it changes anything. The run's lock would stop its ranks, but by then
# the state file, where `bapo status` and `bapo cancel` find the first job, would be the second one's. A job
# in which the run has ended may continue: an allocation of `salloc`.
bapo_refuse_second_job() {
    local other state
    grep -qsx 'status=running' "$BAPO_RUN/$BAPO_STATE_FILE" || return 0
    other=$(sed -n 's/^job=\([0-9][0-9]*\)$/\1/p' "$BAPO_RUN/$BAPO_STATE_FILE" 2>/dev/null | head -n 1)
    [[ -n $other && $other != "$SLURM_JOB_ID" ]] || return 0
    state=$(squeue -h -j "$other" -o %T 2>/dev/null | head -n 1)
    ! bapo_is_live "$state" || bapo_refuse "job $other of the run $BAPO_RUN is" \
        "$state: \`bapo cancel $BAPO_RUN\` lets it save and stop; or give another --run-dir"
}

# Count the last start in a budget if it ended without a record: its node died, or Slurm requeued the job.
bapo_account() {
    local kind why
    bapo_read_state
    if [[ ${bapo_state[status]} = running ]]; then
        kind=node
        [[ -z ${bapo_state[signal]} ]] || kind=preemption
        if ! why=$(bapo_may_requeue "$kind"); then
            bapo_stop "$kind" "$why" "the start before this one ended without a record" 1
            exit 1
        fi
        bapo_read_state
        bapo_event job_requeued_by_slurm "reason=$kind" "count=${bapo_state[$kind]}"
    fi
    bapo_write_state "restart=$BAPO_RESTART" status=running signal= "end=$BAPO_END" \
        "nodes=$(bapo_all_nodes)"
    bapo_event job_start "step=$(bapo_checkpoint_step)" "nodes=${bapo_state[nodes]}" "end=$BAPO_END"
    bapo_say "start $BAPO_RESTART of job $SLURM_JOB_ID on ${bapo_state[nodes]}"
    bapo_say "newest checkpoint: step $(bapo_checkpoint_step)"
}

bapo_told() {  # a signal: ask every rank to save and stop
    BAPO_SIGNAL=$1
    bapo_write_state "signal=$1"
    # Told first: Slurm may take seconds to answer. A shorter limit is followed by its signal at once.
    [[ -z $BAPO_TRAINER ]] || kill -USR1 "$BAPO_TRAINER" 2>/dev/null
    bapo_look_at_end
    bapo_heed_end
    bapo_event signal "signal=$1" "seconds_left=$((BAPO_END > 0 ? BAPO_END - $(date +%s) : -1))"
    bapo_say "$1: the ranks are told to save and stop"
}

# Wait for the trainer (pid of its srun), beside the rollout servers' srun if there is one. Returns the
# job's exit code. bash runs traps only between commands, so nothing here waits in the foreground for long.
bapo_supervise() {
    local rollout=${2:-} code given_up='' looked=$SECONDS failed='' failed_at=0 asked=$SECONDS asking=''
    BAPO_TRAINER=$1
    [[ -z $BAPO_SIGNAL ]] || kill -USR1 "$BAPO_TRAINER" 2>/dev/null  # told before there was a trainer
    bapo_engines=''
    bapo_event job_ready "step=$(bapo_checkpoint_step)"
    if ((BAPO_EXPECTED > 0)) && ! bapo_await_engines; then
        BAPO_NO_ENGINES=yes
        kill -TERM "$BAPO_TRAINER" 2>/dev/null
    fi
    while kill -0 "$BAPO_TRAINER" 2>/dev/null; do
        sleep 1 & builtin wait $!
        if ((SECONDS - asked >= BAPO_END_LOOK_S)) && ! kill -0 "$asking" 2>/dev/null; then
            asked=$SECONDS
            bapo_look_at_end & asking=$!  # beside this loop, which must not wait for Slurm
        fi
        bapo_heed_end
        # Slurm sends --signal up to half a minute early or late.
        if [[ -z $BAPO_SIGNAL ]] && ((BAPO_END > 0 && $(date +%s) >= BAPO_END - BAPO_LEAD_S)); then
            bapo_told deadline
        fi
        if [[ -z $given_up ]] && ((BAPO_END > 0 && $(date +%s) >= BAPO_END - BAPO_MARGIN_S)); then
            given_up=yes
            bapo_event save_given_up "step=$(bapo_checkpoint_step)"
            kill -TERM "$BAPO_TRAINER" 2>/dev/null  # srun ends its step at once
        fi
        if [[ -z $failed ]]; then
            failed=$(bapo_first_failure) failed_at=$SECONDS
        elif ((failed_at > 0 && SECONDS - failed_at >= BAPO_CRASH_WAIT_S)); then
            failed_at=0
            bapo_event ranks_ended "rank=${failed% *}" "exit_code=${failed#* }"
            bapo_say "rank ${failed% *} ended with ${failed#* } and others wait for it: they are killed"
            kill -TERM "$BAPO_TRAINER" 2>/dev/null
        fi
        if ((BAPO_EXPECTED > 0 && SECONDS - looked >= BAPO_LOOK_S)); then
            looked=$SECONDS
            bapo_watch_engines
        fi
    done
    builtin wait "$BAPO_TRAINER"
    code=$?
    # srun returns the largest code of all ranks. The first failure is the cause: later ones follow from it.
    failed=${failed:-$(bapo_first_failure)}
    [[ -z $failed || $code = 85 ]] || code=${failed#* }
    [[ -z $rollout ]] || kill -TERM "$rollout" 2>/dev/null
    bapo_remove_containers
    bapo_finish "$code"
}
