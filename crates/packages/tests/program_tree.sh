#!/bin/sh
# Installs, uses, upgrades and removes the packages of programs in a clean Debian tree. Ends with an
# error at the first check that fails.
#
#   program_tree.sh TREE OLD NEW
#
# TREE is an archive of a Debian tree with man-db and systemd, OLD and NEW are directories with two
# versions of the packages.
set -eu
. "$(dirname "$0")/tree.sh"

# systemd does not run here. Maintainer scripts act as if it did, and their calls are recorded.
mkdir -p "$tree/run/systemd/system"
mv "$tree/bin/systemctl" "$tree/bin/systemctl.real"
cat >"$tree/bin/systemctl" <<'END'
#!/bin/sh
echo "$*" >>/tmp/systemctl
case " $* " in *' daemon-reload '* | *' start '* | *' stop '* | *' restart '* | *' try-restart '*) exit 0 ;; esac
exec /bin/systemctl.real "$@"
END
chmod 755 "$tree/bin/systemctl"
# Whether a command was given to systemd since the last time.
asked() {
    grep -q "$1" "$tree/tmp/systemctl" ||
        fail "not asked of systemd: $1: $(cat "$tree/tmp/systemctl")"
    : >"$tree/tmp/systemctl"
}
enabled() { inside systemctl.real --root=/ is-enabled "${1:-ebb-guest-agent}" 2>&1 || true; }

files | grep -v -x -E './etc/(passwd-|group-|shadow-|gshadow-|\.pwd\.lock)' >"$tree/tmp/before"
: >"$tree/tmp/systemctl"

check 'install'
install old ebb ebbd ebb-guest-agent
equal 'status' "$(inside dpkg-query -W -f '${db:Status-Status} ' ebb ebbd ebb-guest-agent)" \
    'installed installed installed '
equal 'changed files' "$(inside dpkg --verify ebb ebbd ebb-guest-agent)" ''

check 'programs'
version=$(inside dpkg-query -W -f '${Version}' ebb)
equal '--version' "$(inside ebb --version)" "ebb ${version%-1}"
equal "the agent's --version" "$(inside ebb-guest-agent --version)" "ebb-guest-agent ${version%-1}"
equal "the daemon's --version" "$(inside ebbd --version)" "ebbd ${version%-1}"
equal 'the configuration' "$(inside ebbd --check)" '/etc/ebb/ebbd.toml: nothing is wrong'
[ ! -e "$tree/usr/bin/firecracker" ] || fail 'the name firecracker is taken'
equal "modes" "$(stat -c %a "$tree/usr/bin/ebb" "$tree/usr/bin/ebb-guest-agent" | tr '\n' ' ')" \
    '755 755 '

check 'man pages'
commands=$(inside ebb --help | sed -n '/^Commands:/,/^$/s/^  \([a-z][a-z-]*\) .*/\1/p')
[ "$(echo "$commands" | wc -l)" -gt 10 ] || fail "few commands: $commands"
for page in ebb ebb-guest-agent ebbd ebb-ctl-balloon-set \
    $(echo "$commands" | sed '/^help$/d; s/^/ebb-/'); do
    quietly man -w "$page"
    inside man --warnings "$page" >"$log" 2>"$tree/tmp/warnings" || fail "man $page"
    equal "warnings of man $page" "$(cat "$tree/tmp/warnings")" ''
    grep -q '^SYNOPSIS' "$log" || fail "man $page has no synopsis"
done

quietly man -w ebbd.toml
inside man --warnings ebbd.toml >"$log" 2>"$tree/tmp/warnings" || fail 'man ebbd.toml'
equal 'warnings of man ebbd.toml' "$(cat "$tree/tmp/warnings")" ''
grep -q 'tight_percent = 35' "$log" || fail 'man ebbd.toml has no keys'

check 'completions'
completed() {
    inside bash -c '. "/usr/share/bash-completion/completions/$1" && complete -p "$1" >&2 &&
        COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) && "_$1" "$1" "${!#}" && echo "${COMPREPLY[@]}"' \
        bash "$@" 2>"$log" || fail "completion of $*"
}
equal 'completion of a command' "$(completed ebb ru)" run
equal 'completion of an option' "$(completed ebb run --kern)" --kernel
equal "completion of the daemon's option" "$(completed ebbd --gro)" --group
case $(completed ebb '') in *companion*) fail 'a hidden command is completed' ;; esac
for file in zsh/vendor-completions/_ebb fish/vendor_completions.d/ebb.fish; do
    grep -q extract-vmlinux "$tree/usr/share/$file" || fail "$file"
done
for file in zsh/vendor-completions/_ebbd fish/vendor_completions.d/ebbd.fish; do
    grep -q group "$tree/usr/share/$file" || fail "$file"
done

check 'documents'
for package in ebb ebbd ebb-guest-agent; do
    doc=$tree/usr/share/doc/$package
    grep -q '^License: Apache-2.0' "$doc/copyright" || fail "copyright of $package"
    zcat "$doc/licences.gz" | grep -q '^rustix [0-9.]*: ' || fail "licences of $package"
    zcat "$doc/changelog.gz" | grep -q '^# Changelog' || fail "changelog of $package"
    zcat "$doc/changelog.Debian.gz" | grep -q "($version)" || fail "Debian changelog of $package"
done
[ -s "$tree/usr/share/doc/ebbd/host.md" ] || fail 'docs of ebbd'
[ -s "$tree/usr/share/doc/ebb/docs/running.md" ] || fail 'docs'

check 'units'
grep -q 'start.* ebbd.service' "$tree/tmp/systemctl" || fail 'ebbd is not started'
! grep -q ebb-merge-broker "$tree/tmp/systemctl" || fail 'something is done to the broker'
asked 'start.* ebb-guest-agent.service'
equal "the daemon's unit" "$(enabled ebbd)" enabled
equal 'the unit after installation' "$(enabled)" enabled
quietly systemd-analyze verify --man=no /lib/systemd/system/ebb-guest-agent.service
equal 'complaints of systemd' "$(grep ebb-guest-agent "$log" || true)" ''
equal 'units of ebb' "$(inside dpkg -L ebb | grep '\.service$' || true)" \
    /lib/systemd/system/ebb-merge-broker.service
equal "the broker's unit" "$(enabled ebb-merge-broker)" disabled
inside systemctl.real --root=/ disable ebb-guest-agent >"$log" 2>&1 || fail 'disable'

check 'upgrade'
install new ebb ebbd ebb-guest-agent
[ "$(inside dpkg-query -W -f '${Version}' ebb)" != "$version" ] || fail 'not upgraded'
grep -q 'try-restart.* ebb-merge-broker.service' "$tree/tmp/systemctl" || fail 'the broker is old'
asked 'restart.* ebb-guest-agent.service'
equal 'a disabled unit after the upgrade' "$(enabled)" disabled
inside systemctl.real --root=/ enable ebb-guest-agent >"$log" 2>&1 || fail 'enable'

check 'remove'
quietly apt-get remove -y ebb ebbd ebb-guest-agent
asked 'stop.* ebb-guest-agent.service'
equal 'programs left' "$(ls "$tree/usr/bin" | grep -c ebb || true)" 0
equal 'status' "$(inside dpkg-query -W -f '${db:Status-Status} ' ebb ebbd)" \
    'config-files config-files '
check 'install again, purge'
install new ebb ebbd ebb-guest-agent
equal 'the unit after a second installation' "$(enabled)" enabled
quietly apt-get purge -y ebb ebbd ebb-guest-agent
case $(enabled) in enabled | disabled | masked) fail 'the unit is left' ;; esac
# The daemon's user and group stay, and so do the copies of their lists before a change.
files | grep -v -x -E './etc/(passwd-|group-|shadow-|gshadow-|\.pwd\.lock)' >"$tree/tmp/after"
diff "$tree/tmp/before" "$tree/tmp/after" >"$log" || fail 'files are left'
check 'nothing is left'
