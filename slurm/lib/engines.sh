# shellcheck shell=bash
# Registry of rollout servers: RUN/engines/HOST-PORT.json, which each server's task renews while it is alive.

bapo_engines_alive() {  # addresses of the live servers, one a line
    local file url
    for file in "$BAPO_RUN/$BAPO_ENGINES_FOLDER"/*.json; do
        [[ -f $file && ! -L $file && -O $file ]] || continue  # of this user, and no link
        grep -q '"state": "ready"' "$file" 2>/dev/null || continue
        (($(date +%s) - $(stat -c %Y "$file" 2>/dev/null || echo 0) < BAPO_FRESH_S)) || continue
        url=$(sed -n 's/.*"url": "\([^"]*\)".*/\1/p' "$file")
        [[ $url =~ ^http://[A-Za-z0-9][A-Za-z0-9._-]*:[0-9]{1,5}$ ]] || continue  # one address, and no flag
        echo "$url"
    done
}

bapo_forget_engines() {  # delete the entries of this job's last start
    mkdir -p "$BAPO_RUN/$BAPO_ENGINES_FOLDER"
    grep -lsZ "\"job\": $SLURM_JOB_ID," "$BAPO_RUN/$BAPO_ENGINES_FOLDER"/*.json | xargs -0r rm -f
}

# Wait for the expected servers, then write their addresses to logs/engines, which the trainer's tasks poll.
bapo_await_engines() {
    local deadline=$((SECONDS + BAPO_ENGINES_WAIT_S)) found=0
    while :; do
        bapo_engines=$(bapo_engines_alive | sort)
        found=$(grep -c . <<<"$bapo_engines")
        ((found >= BAPO_EXPECTED)) && break
        if ((SECONDS >= deadline)); then
            bapo_event engines_missing "expected=$BAPO_EXPECTED" "found=$found"
            ((found > 0)) || return 1
            break
        fi
        # The supervisor reports the end of the trainer.
        kill -0 "$BAPO_TRAINER" 2>/dev/null && [[ -z $BAPO_SIGNAL ]] || return 0
        sleep 1 & builtin wait $!
    done
    echo "$bapo_engines" >"$BAPO_LOGS/.engines.tmp" && mv "$BAPO_LOGS/.engines.tmp" "$BAPO_LOGS/engines"
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
