#!/usr/bin/env bash
# The tests with the most threads and the most unsafe code under the sanitizers of LLVM: `tests/sanitize.sh address`,
# `tests/sanitize.sh thread`, or both. Needs a nightly toolchain; says so and fails where there is none.
#
# The standard library is not built anew, so ThreadSanitizer does not see into it: what that makes it say wrongly
# stands in tests/thread.supp with the reason. `crossbeam_sanitize` lets epochs end sooner, so that what was freed
# too early is freed during a test.
set -euo pipefail
cd "$(dirname "$0")/.."

kinds=("$@")
[[ ${#kinds[@]} -gt 0 ]] || kinds=(address thread)
host=$(rustc +nightly -vV | sed -n 's/^host: //p')
tests=(--lib --test claims --test compact --test leases --test lease_crowd --test lease_passing --test lease_slots
    --test lease_keeping --test index_file --test observe --test checkpoint --test mutators --test regressions)

for kind in "${kinds[@]}"; do
    printf '\n== %s sanitizer\n' "$kind"
    flags="-Zsanitizer=$kind --cfg crossbeam_sanitize"
    if [[ $kind == thread ]]; then flags+=" --cfg crossbeam_sanitize_thread -Cunsafe-allow-abi-mismatch=sanitizer"; fi
    ASAN_OPTIONS=detect_leaks=1 TSAN_OPTIONS="suppressions=$PWD/tests/thread.supp halt_on_error=1 second_deadlock_stack=1" \
        RUSTFLAGS="$flags" CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/$kind" \
        cargo +nightly test --locked --features testkit --target "$host" "${tests[@]}"
done
