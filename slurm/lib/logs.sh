# shellcheck shell=bash
# Where everything is written: RUN/logs/JOB/RESTART/{job.log, trainer-NODE-RANK.log, rollout-NODE-RANK.log}.

bapo_say() { echo "[$(date +%T)] $*"; }

bapo_open_logs() {
    BAPO_LOGS=$BAPO_RUN/logs/$SLURM_JOB_ID/$BAPO_RESTART
    mkdir -p "$BAPO_LOGS" || bapo_refuse "the run directory $BAPO_RUN cannot be written to"
    export BAPO_LOGS
    echo "job $SLURM_JOB_ID, restart $BAPO_RESTART: logs are in $BAPO_LOGS"
    exec >>"$BAPO_LOGS/job.log" 2>&1
}

# The last line of the log of the rank that went first: those that follow complain of its absence.
bapo_cause() {
    local log line
    while read -r log; do
        if grep -qE '^(Traceback|error:|stopped:)|Error' "$log"; then
            line=$(grep -E '^([A-Za-z_.]+(Error|Exception)|error:|stopped:)' "$log" | tail -n 1)
            echo "${line:-$(grep -v '^[[:space:]]*$' "$log" | tail -n 1)} (${log##*/})"
            return
        fi
    done < <(ls -tr "$BAPO_LOGS"/trainer-*.log 2>/dev/null)
    line=$(grep -E '^(srun|slurmstepd).*(Killed|oom|Node failure|error:)' "$BAPO_LOGS/job.log" | tail -n 1)
    echo "${line:-no trainer said why}"
}

# The end of a job that will not come back, told where one looks first: at the top of its log, and at the end.
bapo_headline() {
    local text=$1 temporary=$BAPO_LOGS/.job.log.tmp
    { echo "$text"; echo; cat "$BAPO_LOGS/job.log"; } >"$temporary"
    mv -f "$temporary" "$BAPO_LOGS/job.log"
    exec >>"$BAPO_LOGS/job.log" 2>&1
    bapo_say "$text"
}
