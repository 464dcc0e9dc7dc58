#!/usr/bin/env bash
# The tests with the most threads and the most unsafe code under the sanitizers of LLVM: `tests/sanitize.sh address`,
# `tests/sanitize.sh thread`, or both. Needs a nightly toolchain; fails where there is none.
#
# The standard library is not built anew, so ThreadSanitizer does not see into it: what that makes it say wrongly
# stands in tests/thread.supp. Nor does it see that a scope waits for its threads: tests join those themselves, and the
# two of code that leaves it to the scope are left out.
# `crossbeam_sanitize` lets epochs end sooner, so that what is freed too early is freed during a test.
set -euo pipefail
cd "$(dirname "$0")/.."

kinds=("$@")
[[ ${#kinds[@]} -gt 0 ]] || kinds=(address thread)
host=$(rustc +nightly -vV | sed -n 's/^host: //p')

for kind in "${kinds[@]}"; do
    printf '\n== %s sanitizer\n' "$kind"
    flags="-Zsanitizer=$kind --cfg crossbeam_sanitize"
    case $kind in
    address)
        tests=(--lib --test claims --test compact --test leases --test lease_crowd --test lease_passing
            --test lease_slots --test lease_keeping --test index_file --test observe --test checkpoint
            --test mutators --test regressions)
        ;;
    thread)
        flags+=" --cfg crossbeam_sanitize_thread -Cunsafe-allow-abi-mismatch=sanitizer"
        tests=(--lib --test leases -- --skip threads_change_nothing)
        ;;
    *)
        echo "$kind: address or thread?"
        exit 2
        ;;
    esac
    # Tests that play a crash forget their leases: leaks are no finding.
    ASAN_OPTIONS=detect_leaks=0 TSAN_OPTIONS="suppressions=$PWD/tests/thread.supp" \
        RUSTFLAGS="$flags" CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/$kind" \
        cargo +nightly test --locked --features testkit --target "$host" "${tests[@]}"
done
