#!/bin/sh
# Builds the Debian packages: ebb, ebbd and ebb-guest-agent from compiled programs (`make deb`
# compiles them first), ebb-balloon-dkms from the sources of the guest's modules. What a package
# contains is in crates/packages/debian.
#
#   scripts/build-deb.sh PROGRAMS OUTPUT [VERSION]
#
# PROGRAMS is a directory with ebb, ebbd, ebb-guest-agent and ebb-packages, OUTPUT one for the
# packages. VERSION is that of Cargo.toml by default. The same commit and programs make the same
# packages: their files have the date of the commit (or SOURCE_DATE_EPOCH).
set -eu

[ $# -ge 2 ] && [ $# -le 3 ] || { echo "usage: $0 PROGRAMS OUTPUT [VERSION]" >&2; exit 2; }
programs=$(realpath "$1")
mkdir -p "$2"
output=$(realpath "$2")
cd "$(dirname "$0")/.."
version=${3:-$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml)}-1
commit_date=$(git log -1 --format=%ct 2>/dev/null || stat -c %Y CHANGELOG.md)
export SOURCE_DATE_EPOCH="${SOURCE_DATE_EPOCH:-$commit_date}"
umask 022

stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
cp -r crates/packages/debian README.md CHANGELOG.md "$stage"
mkdir "$stage/bin" "$stage/docs" "$stage/packages"
cp docs/*.md docs/openapi.json "$stage/docs"
cp guest/exec/ebb-guest-agent.service "$stage/debian"
driver=guest/linux/ebb_balloon
cp --parents "$driver/Kbuild" "$driver"/*.[ch] "$driver/README.md" "$stage"
cp "$programs/ebb" "$programs/ebbd" "$programs/ebb-guest-agent" "$stage/bin"
"$programs/ebb-packages" "$stage"
cp crates/ebbd/dashboard.json "$stage/grafana-dashboard.json"
{
    printf 'ebb (%s) unstable; urgency=medium\n\n' "$version"
    printf '  * Version %s of Ebb: see changelog.gz.\n\n' "${version%-1}"
    printf ' -- %s  %s\n' "$(sed -n 's/^Maintainer: //p' crates/packages/debian/control)" \
        "$(date -u -R -d "@$SOURCE_DATE_EPOCH")"
} >"$stage/debian/changelog"

log=$stage/log
if ! (cd "$stage" && debian/rules binary) >"$log" 2>&1; then
    cat "$log" >&2
    exit 1
fi
for package in "$stage"/packages/*.deb; do
    mv "$package" "$output"
    echo "$output/${package##*/}"
done
