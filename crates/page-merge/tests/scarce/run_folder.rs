//! A directory for the domain's name without room: merging by the kernel is refused.

use std::path::Path;

use ebb_page_merge::kernel::KernelDomain;

/// Body of the test's process, where `run` is a file system without room.
pub fn join(folder: &Path) {
    let run = folder.join("run");
    for _ in 0..2 {
        let error = KernelDomain::join(&run, "web").unwrap_err().to_string();
        assert!(error.contains("run/ksm-domain") && error.contains("No space left"), "{error}");
    }
    let full = run.join("full");
    std::fs::remove_file(&full).unwrap();
    let first = KernelDomain::join(&run, "web").unwrap();
    // Full again: an existing file needs no room.
    std::fs::write(&full, vec![1_u8; 1 << 20]).unwrap_err();
    let second = KernelDomain::join(&run, "web").unwrap();
    drop(first);
    let error = KernelDomain::join(&run, "mail").unwrap_err().to_string();
    assert!(error.contains("'web'"), "{error}");
    drop(second);
    println!("joined and left");
}

#[test]
fn without_room_for_the_domains_name_the_kernel_does_not_merge() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("not tested: only root can mount a small file system");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("run")).unwrap();
    // In its own mount namespace, whose end removes the mount.
    let preparation =
        "[ -n \"$apart\" ] || apart=1 exec unshare --mount --propagation private sh -e -c '
        mount -t tmpfs -o size=256k none \"$folder/run\"
        ! head -c 1M /dev/zero 2>/dev/null > \"$folder/run/full\"
        exec \"$@\"' sh \"$0\" --exact child::another_process --ignored --nocapture --quiet";
    let said = crate::child::run("joins", folder.path(), preparation);
    assert!(said.contains("joined and left"), "{said}");
}
