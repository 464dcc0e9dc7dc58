#!/usr/bin/env bash
# Fuzzes each target, or those named, for so many seconds: `fuzz/run.sh 10`, `fuzz/run.sh 3600 ops_crash`.
# Memory is bounded, a single allocation too; inputs are long from the start, for short ones hold few operations. New inputs
# go below target/, the committed ones stay as they are. A target that finds something leaves the others their time.
set -euo pipefail
cd "$(dirname "$0")/.."

seconds=${1:?how many seconds a target?}
shift
targets=("$@")
if [[ ${#targets[@]} == 0 ]]; then mapfile -t targets < <(cargo +nightly fuzz list); fi

failed=()
for name in "${targets[@]}"; do
    printf '\n== fuzzing %s for %s seconds\n' "$name" "$seconds"
    found="${CARGO_TARGET_DIR:-target}/fuzz-corpus/$name"
    mkdir -p "$found" "fuzz/corpus/$name"
    cargo +nightly fuzz run "$name" "$found" "fuzz/corpus/$name" -- -max_total_time="$seconds" \
        -max_len=1024 -len_control=0 -timeout=20 -rss_limit_mb=1024 -malloc_limit_mb=64 -print_final_stats=1 ||
        failed+=("$name")
done
[[ ${#failed[@]} == 0 ]] || { echo "something was found by: ${failed[*]}"; exit 1; }
