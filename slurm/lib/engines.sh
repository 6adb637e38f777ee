# shellcheck shell=bash
# Registry of rollout servers: RUN/engines/HOST-PORT.json, which each server's task renews while it is alive.

BAPO_URL_OF='s/.*"url": "\([^"]*\)".*/\1/p'  # of sed: the address in an entry

bapo_file_time() {  # now, by the clock that stamps files: that of a file server may be minutes off
    { touch "$BAPO_LOGS/.now.tmp" && stat -c %Y "$BAPO_LOGS/.now.tmp"; } 2>/dev/null || date +%s
}

bapo_engines_alive() {  # addresses of the live servers, one a line
    local file now
    now=$(bapo_file_time)
    for file in "$BAPO_RUN/$BAPO_ENGINES_FOLDER"/*.json; do
        grep -q '"state": "ready"' "$file" 2>/dev/null || continue
        ((now - $(stat -c %Y "$file" 2>/dev/null || echo 0) < BAPO_FRESH_S)) || continue
        sed -n "$BAPO_URL_OF" "$file"
    done
}

bapo_engines_of_job() {  # addresses of the servers that this start has begun, ready or not, one a line
    grep -hs "\"job\": $SLURM_JOB_ID," "$BAPO_RUN/$BAPO_ENGINES_FOLDER"/*.json | sed -n "$BAPO_URL_OF"
}

bapo_start_s() {  # longest start of the servers that this start has begun, by their recipe
    grep -hs "\"job\": $SLURM_JOB_ID," "$BAPO_RUN/$BAPO_ENGINES_FOLDER"/*.json |
        sed -n 's/.*"start_s": \([0-9]\{1,9\}\)}.*/\1/p' | sort -n | tail -n 1
}

bapo_forget_engines() {  # delete the entries of this job's last start
    mkdir -p "$BAPO_RUN/$BAPO_ENGINES_FOLDER"
    grep -lsZ "\"job\": $SLURM_JOB_ID," "$BAPO_RUN/$BAPO_ENGINES_FOLDER"/*.json | xargs -0r rm -f
}

# Wait for the expected servers, then write their addresses to logs/engines, which the trainer's tasks poll.
# While none is ready the wait is longer: by the time to read their weights, and as long as one may start.
bapo_await_engines() {
    local began=$SECONDS deadline=$((SECONDS + BAPO_ENGINES_WAIT_S)) found=0 late='' longest
    while :; do
        bapo_engines=$(bapo_engines_alive | sort)
        found=$(grep -c . <<<"$bapo_engines")
        ((found >= BAPO_EXPECTED)) && break
        longest=$(bapo_start_s)
        if ((SECONDS >= deadline && (found > 0 ||
            (SECONDS >= deadline + BAPO_ENGINES_LOAD_S && SECONDS >= began + ${longest:-0})))); then
            bapo_event engines_missing "expected=$BAPO_EXPECTED" "found=$found"
            ((found > 0)) || return 1
            late=$(bapo_engines_of_job)  # the trainer takes a server once it answers: these join it later
            break
        fi
        # The supervisor reports the end of the trainer.
        kill -0 "$BAPO_TRAINER" 2>/dev/null && [[ -z $BAPO_SIGNAL ]] || return 0
        sleep 1 & builtin wait $!
    done
    # shellcheck disable=SC2086  # a word for each address
    printf '%s\n' $bapo_engines $late | sort -u >"$BAPO_LOGS/.engines.tmp" &&
        mv "$BAPO_LOGS/.engines.tmp" "$BAPO_LOGS/engines"
    bapo_event engines_ready "engines=$found" "expected=$BAPO_EXPECTED"
}

bapo_watch_engines() {  # write an event for each server that is lost or back; the run continues
    local now url
    now=$(bapo_engines_alive | sort)
    for url in $(comm -23 <(echo "$bapo_engines") <(echo "$now")); do
        bapo_event rollout_lost "engine=$url"
    done
    for url in $(comm -13 <(echo "$bapo_engines") <(echo "$now")); do
        bapo_event rollout_back "engine=$url"
    done
    bapo_engines=$now
}
