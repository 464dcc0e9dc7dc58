#!/usr/bin/env bash
# Every check of the project, in one place; CONTRIBUTING.md says what they are. Fails when anything fails, and
# says loudly what it had to skip.
set -euo pipefail
cd "$(dirname "$0")"

skipped=()
# Says how long the step before took.
step() {
    if [[ -n ${begun:-} ]]; then printf -- '-- %s s\n' $((SECONDS - begun)); fi
    begun=$SECONDS
    printf '\n== %s\n' "$*"
}
skip() { printf '\n!! SKIPPED: %s\n' "$*"; skipped+=("$*"); }
has_toolchain() { command -v rustup >/dev/null && rustup toolchain list | grep -q "^$1"; }
has_target() { command -v rustup >/dev/null && rustup target list --installed | grep -qx "$1"; }

target=${CARGO_TARGET_DIR:-target}

step "form"
cargo fmt --check
if [[ -f fuzz/Cargo.toml ]]; then cargo fmt --check --manifest-path fuzz/Cargo.toml; fi
cargo fmt --check --manifest-path model/Cargo.toml
cargo fmt --check --manifest-path gallery/Cargo.toml
cargo fmt --check --manifest-path benches/peers/Cargo.toml
cargo fmt --check --manifest-path kernel/Cargo.toml

step "clippy, all targets and features; the library without any"
cargo clippy --locked --all-targets --all-features -- -D warnings
cargo clippy --locked --no-default-features -- -D warnings

if command -v cargo-deny >/dev/null; then
    step "dependencies: licenses, advisories, sources"
    cargo deny check
else
    skip "cargo deny: cargo-deny is not installed"
fi

step "documents"
RUSTDOCFLAGS="-D warnings" cargo doc --locked --no-deps --all-features
RUSTDOCFLAGS="-D warnings" cargo doc --locked --no-deps

# `.ci/run` has run them just before, as README says it.
if [[ -z ${ALREADY_TESTED:-} ]]; then
    step "tests with all features, doc tests among them"
    cargo test --locked --all-features
fi

step "tests without features"
cargo test --locked --no-default-features --lib --tests

step "interleavings (loom)"
RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR="$target/loom" cargo test --locked --profile loom --test loom

step "the lease table, and the whole engine with power cuts, under random schedules (shuttle)"
schedules() {
    RUSTFLAGS="--cfg shuttle -C debug-assertions" CARGO_TARGET_DIR="$target/shuttle" \
        cargo test --locked --release --features testkit "$@"
}
schedules --test shuttle
schedules --lib -- --nocapture durably_linearizable readers_beside

step "a million power cuts, every error of every storage call, every short sequence, stores that compact all the time"
TIDEWALL_CAMPAIGN=1000000 TIDEWALL_CAMPAIGN_ERRORS=2 TIDEWALL_CAMPAIGN_STEPS=3 TIDEWALL_CAMPAIGN_BUSY=200 \
    cargo test --locked --release --features testkit --test campaign -- --nocapture --test-threads 1

step "the protocol searched exhaustively, and the engine beside its model"
CARGO_TARGET_DIR="$target/model" cargo clippy --locked --release --all-targets --manifest-path model/Cargo.toml -- -D warnings
CARGO_TARGET_DIR="$target/model" cargo test --locked --release --manifest-path model/Cargo.toml

step "a gallery of bugs: each still fits the source, and the tests find every tenth"
CARGO_TARGET_DIR="$target/tools" cargo clippy --locked --release --all-targets --manifest-path gallery/Cargo.toml -- -D warnings
CARGO_TARGET_DIR="$target/tools" cargo test --locked --release --manifest-path gallery/Cargo.toml
CARGO_TARGET_DIR="$target/tools" cargo build --locked --release --manifest-path gallery/Cargo.toml
CARGO_TARGET_DIR="$target" "$target/tools/release/tidewall-gallery" --every 10

# The toolchain in use may be the promised one already; then all of the above was built with it.
msrv=$(sed -n 's/^rust-version = "\([0-9.]*\)".*/\1/p' Cargo.toml)
if [[ $(rustc --version) == "rustc $msrv."* ]]; then
    step "the promised toolchain, $msrv, is the one in use"
elif has_toolchain "$msrv.0"; then
    step "the promised toolchain, $msrv"
    CARGO_TARGET_DIR="$target/msrv" cargo "+$msrv.0" check --locked --all-features
else
    skip "the promised toolchain: $msrv.0 is not installed"
fi

for platform in x86_64-pc-windows-gnu aarch64-apple-darwin; do
    if has_target "$platform"; then
        step "the library on $platform"
        cargo check --locked --all-features --target "$platform"
    else
        skip "the library on $platform: the target is not installed"
    fi
done

if [[ ! -f fuzz/Cargo.toml ]]; then
    skip "fuzzing: there is no fuzz/"
elif ! command -v cargo-fuzz >/dev/null || ! has_toolchain nightly; then
    skip "fuzzing: needs cargo-fuzz and a nightly toolchain"
else
    step "fuzzing, ten seconds a target"
    fuzz/run.sh 10
fi

# Everything is built twice more for them.
if [[ -z ${TIDEWALL_SANITIZE:-} ]]; then
    skip "AddressSanitizer and ThreadSanitizer: TIDEWALL_SANITIZE is not set"
elif ! has_toolchain nightly; then
    skip "AddressSanitizer and ThreadSanitizer: need a nightly toolchain"
else
    step "the tests with the most threads under AddressSanitizer and ThreadSanitizer"
    tests/sanitize.sh
fi

# Each of its parts is run where the machine can; the others are named.
if [[ $(uname) == Linux ]]; then
    step "the real kernel: killed at every system call, full and failing disks, power cuts (kernel/)"
    CARGO_TARGET_DIR="$target/kernel" cargo clippy --locked --all-targets --manifest-path kernel/Cargo.toml -- -D warnings
    CARGO_TARGET_DIR="$target/kernel" cargo test --locked --manifest-path kernel/Cargo.toml
    said=$(mktemp)
    CARGO_TARGET_DIR="$target/kernel" cargo run --locked --manifest-path kernel/Cargo.toml -- --steps 30 --every 31 | tee "$said"
    while read -r what; do skipped+=("$what"); done < <(sed -n 's/^!! NOT RUN: //p' "$said" | sort -u)
    rm -f "$said"
else
    skip "the real kernel (kernel/): needs Linux"
fi

if [[ -e examples/paused_worker.rs || -e examples/paused_worker/main.rs ]]; then
    step "the main job on a small input"
    cargo run --locked --release --example paused_worker -- --jobs 40 --workers 4 --pauses 2 --unfenced
else
    skip "the main job: there is no example paused_worker"
fi

if compgen -G "benches/*.rs" >/dev/null; then
    step "the benches compile"
    cargo bench --locked --no-run
else
    skip "benches: there are none"
fi

step "everything that ran has passed, in $SECONDS s"
for what in "${skipped[@]}"; do printf '!! SKIPPED: %s\n' "$what"; done
