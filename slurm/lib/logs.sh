# shellcheck shell=bash
# Log files of a job: RUN/logs/JOB/RESTART/{job.log, trainer-NODE-RANK.log, rollout-NODE-RANK.log}.

bapo_say() { echo "[$(date +%T)] $*"; }

bapo_open_logs() {
    BAPO_LOGS=$BAPO_RUN/$BAPO_LOGS_FOLDER/$SLURM_JOB_ID/$BAPO_RESTART
    bapo_await_disk
    export BAPO_LOGS
    echo "job $SLURM_JOB_ID, restart $BAPO_RESTART: logs are in $BAPO_LOGS"
    exec >>"$BAPO_LOGS/job.log" 2>&1
}

# A failing file system may recover, so retry; report any other reason at once.
bapo_await_disk() {
    local deadline=$((SECONDS + BAPO_DISK_WAIT_S)) problem
    until problem=$(LC_ALL=C mkdir -p "$BAPO_LOGS/ended" 2>&1); do
        if ! [[ $problem =~ Input/output|Stale|endpoint ]] || ((SECONDS >= deadline)); then
            bapo_refuse "the run directory $BAPO_RUN cannot be written to: $problem"
        fi
        sleep 5 & builtin wait $!
    done
}

# RANK CODE of the first rank that ended badly, by the files that task.sh leaves; nothing if none has.
bapo_first_failure() {
    local files file code
    files=$(find "$BAPO_LOGS/ended" -type f ! -name '*.tmp' -printf '%T@ %p\n' 2>/dev/null | sort -n)
    while read -r _ file; do
        if [[ -z $file ]] || ! read -r code <"$file"; then continue; fi
        [[ $code = 0 || $code = 85 ]] || { echo "${file##*/} $code"; return; }
    done <<<"$files"
}

# The last line of the log of the rank that failed first: later failures only report its absence.
bapo_cause() {
    local log line
    while read -r log; do
        if grep -qE '^(Traceback|error:|stopped:)|Error' "$log"; then
            line=$(grep -E '^([A-Za-z_.]+(Error|Exception)|error:|stopped:)' "$log" | tail -n 1)
            echo "${line:-$(grep -v '^[[:space:]]*$' "$log" | tail -n 1)} (${log##*/})"
            return
        fi
    done < <(bapo_logs_in_order)
    line=$(grep -E '^(srun|slurmstepd).*(Killed|oom|Node failure|error:)' "$BAPO_LOGS/job.log" | tail -n 1)
    echo "${line:-no error in the logs of the trainer}"
}

bapo_logs_in_order() {  # of the trainer: the first rank's that ended badly, then as they were last written
    local rank
    rank=$(bapo_first_failure)
    [[ -z $rank ]] || ls "$BAPO_LOGS"/trainer-*-"${rank% *}.log" 2>/dev/null
    ls -tr "$BAPO_LOGS"/trainer-*.log 2>/dev/null
}

# Write the reason why a job is not requeued to the top of job.log and to its end.
bapo_headline() {
    local text=$1 temporary=$BAPO_LOGS/.job.log.tmp
    { echo "$text"; echo; cat "$BAPO_LOGS/job.log"; } >"$temporary"
    mv -f "$temporary" "$BAPO_LOGS/job.log"
    exec >>"$BAPO_LOGS/job.log" 2>&1
    bapo_say "$text"
}
