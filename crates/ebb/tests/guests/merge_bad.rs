//! Requested merging that is unavailable: the machine runs without it and reports the reason.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command as Program;

use ebb_agent::protocol::Command;
use ebb_virtual_host::kernel::is_at_least;
use ebb_vmm::api::{MergeState, VmState};
use serde_json::json;

use crate::guest::{Guest, MIB};
use crate::harness::{Scene, Test, eventually, when};
use crate::merge_support::{Knob, member, merged};
use crate::setup::Setup;

/// The tests.
pub const TESTS: &[Test] = &[
    Test::new("merge_bad::kernels_without", 120, kernels_without),
    Test::new("merge_bad::memory_that_cannot_be_merged", 120, memory_that_cannot_be_merged)
        .merging(),
    Test::new("merge_bad::without_permission", 120, without_permission).merging(),
    Test::new("merge_bad::nodes_while_merged", 180, nodes_while_merged).merging(),
];

/// User "nobody" of Linux.
const NOBODY: u32 = 65534;

/// Fails unless the machine runs unmerged and reports these words in the API and in its log.
#[track_caller]
fn check_unavailable(guest: &Guest, words: &[&str]) {
    let info = guest.merge();
    let reason = info.reason.clone().unwrap_or_default();
    assert_eq!((info.state, info.statistics.as_ref()), (MergeState::Unavailable, None), "{info:?}");
    for word in words {
        assert!(reason.contains(word), "'{word}' is missing: {reason}");
    }
    assert!(guest.log().contains(&reason), "{reason}\nis not in the log:\n{}", guest.log());
    // The API answers before the machine runs.
    eventually("the machine runs", 30, || {
        let state = guest.vm().state;
        when(state == VmState::Running, || format!("{state:?}"))
    });
    let (status, said) = guest.refused("PUT", "/merge", r#"{"run":"merge"}"#);
    assert_eq!(status, 409, "{said}");
}

fn kernels_without(scene: &Scene) {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let guest = merged(scene, "160M", "").start();
    if is_at_least(&release, 6, 8) {
        // This kernel lacks nothing.
        assert_eq!(guest.merge().state, MergeState::Merging);
    } else {
        check_unavailable(&guest, &["kernel", "Linux 6."]);
    }
    guest.run(Command::Hold { bytes: 16 * MIB, pattern: 81 });
    guest.check_held();
}

fn memory_that_cannot_be_merged(scene: &Scene) {
    for (backing, word) in [("memfd", "memfd"), ("hugetlb", "huge pages")] {
        let memory = format!("size=160M,backing={backing},merge=owner");
        let guest = Setup::new(scene).memory(&memory).start_api();
        check_unavailable(&guest, &[word]);
        guest.end();
    }
    // Hardly any mappings are left: each run of merged pages takes one.
    let few = Knob::set("/proc/sys/vm/max_map_count", "2000");
    let guest = merged(scene, "160M", "").start_api();
    check_unavailable(&guest, &["vm.max_map_count", "2000"]);
    drop(few);
    guest.end();
    // Without its broker, a machine merges only its own pages. ksmd merges none of it, although the
    // monitor is started by a process of which it may merge everything.
    let broker = member(&scene.path("nobody"), "red");
    let mut program = merged(scene, "160M", &broker).program();
    offer_all_memory_to_ksmd(&mut program);
    let mut guest = Guest::spawn(program, scene.path("api"), &scene.guests());
    guest.wait_api();
    let smaps = fs::read_to_string(format!("/proc/{}/smaps", guest.pid())).unwrap();
    let offered = |line: &&str| line.starts_with("VmFlags:") && line.contains(" mg");
    assert_eq!(smaps.lines().find(offered), None);
    let info = guest.merge();
    assert_eq!(info.state, MergeState::Degraded, "{info:?}");
    assert!(info.reason.as_ref().is_some_and(|reason| reason.contains("nobody")), "{info:?}");
    guest.end();
}

/// Lets ksmd merge all memory of the program, as `MemoryKSM=` of a systemd service does.
fn offer_all_memory_to_ksmd(program: &mut Program) {
    // include/uapi/linux/prctl.h
    const PR_SET_MEMORY_MERGE: libc::c_int = 67;
    // SAFETY: the call changes what ksmd may merge, and no content.
    let offer = || match unsafe { libc::prctl(PR_SET_MEMORY_MERGE, 1, 0, 0, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    };
    // SAFETY: the function makes one system call, and allocates nothing.
    unsafe { program.pre_exec(offer) };
}

/// Permissions of a file, changed for a test and restored at its end.
struct Mode {
    path: PathBuf,
    before: fs::Permissions,
}

impl Mode {
    fn set(path: &Path, mode: u32) -> Self {
        let before = fs::metadata(path).unwrap().permissions();
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        Self { path: path.to_owned(), before }
    }
}

impl Drop for Mode {
    fn drop(&mut self) {
        let _ = fs::set_permissions(&self.path, self.before.clone());
    }
}

fn without_permission(scene: &Scene) {
    if !rustix::process::geteuid().is_root() {
        // Only root can become another user.
        return;
    }
    let _kvm = Mode::set(Path::new("/dev/kvm"), 0o666);
    let _userfaultfd = Mode::set(Path::new("/dev/userfaultfd"), 0o600);
    let _knob = Knob::set("/proc/sys/vm/unprivileged_userfaultfd", "0");
    let directory = Mode::set(&scene.path(""), 0o777);
    let setup = merged(scene, "160M", "");
    let mut program = setup.program();
    program.uid(NOBODY).gid(NOBODY);
    let guest = Guest::spawn(program, scene.path("api"), &scene.guests());
    guest.wait_ready(1);
    check_unavailable(&guest, &["/dev/userfaultfd", "CAP_SYS_PTRACE"]);
    guest.run(Command::Hold { bytes: 16 * MIB, pattern: 82 });
    guest.check_held();
    drop(directory);
}

fn nodes_while_merged(scene: &Scene) {
    let guest = merged(scene, "160M", "").start_and_merge();
    for _ in 0..2 {
        guest.run(Command::Hold { bytes: 16 * MIB, pattern: 83 });
    }
    guest.wait_merged(16 * MIB);
    let (status, said) = guest.refused("PUT", "/merge", r#"{"merge_across_nodes":false}"#);
    assert!(status == 409 && said.contains("unmerge"), "{status}: {said}");
    let settings = guest.merge().settings.expect("settings");
    assert_eq!(settings.merge_across_nodes, Some(true), "{settings:?}");
    guest.unmerge();
    guest.check_held();
    guest.set_merge(&json!({ "merge_across_nodes": false }));
    guest.set_merge(&json!({ "run": "merge" }));
    for _ in 0..2 {
        guest.run(Command::Hold { bytes: 16 * MIB, pattern: 84 });
    }
    guest.wait_merged(16 * MIB);
    let statistics = guest.merge_statistics();
    assert_eq!(statistics.remote_merged_pages, Some(0), "{statistics:?}");
    guest.check_held();
    // As configured at the start.
    guest.end();
    let setup = merged(scene, "160M", ",merge_across_nodes=off").socket("apart");
    let settings = setup.start_api().merge().settings.expect("settings");
    assert_eq!(settings.merge_across_nodes, Some(false), "{settings:?}");
}
