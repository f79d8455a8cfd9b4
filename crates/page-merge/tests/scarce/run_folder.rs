//! A folder of records without room: merging by the kernel is refused, and nothing is changed.

use std::path::Path;
use std::sync::Arc;

use ebb_page_merge::kernel::{Knob, Ksm, KsmUsers, Membership, Values};

/// Settings as the kernel has them, in a folder.
const FILES: [(&str, &str); 4] =
    [("run", "0"), ("merge_across_nodes", "1"), ("pages_shared", "0"), ("pages_sharing", "0")];

fn attempt(folder: &Path) -> Result<Membership, String> {
    let ksm = Ksm::open(&folder.join("ksm")).map_err(|error| error.to_string())?;
    let wanted = Values::new().with(Knob::Run, 1);
    let users = KsmUsers::open(&folder.join("run")).map_err(|error| error.to_string())?;
    users.join(Arc::new(ksm), "web", &wanted).map_err(|error| error.to_string())
}

/// Users that live as long as anybody, as many as fit into a page of the file.
fn many_users() -> String {
    let stat = std::fs::read_to_string("/proc/1/stat").unwrap();
    let ticks =
        stat.rsplit_once(')').unwrap().1.split_ascii_whitespace().nth(19).unwrap().to_owned();
    let user = format!("{{\"pid\":1,\"start_ticks\":{ticks}}}");
    let head = "{\"domain\":\"web\",\"users\":[";
    let users = vec![user.clone(); (4095 - head.len() - 20) / (user.len() + 1)];
    format!("{head}{}],\"originals\":{{}}}}", users.join(","))
}

/// What the test's process does, where `run` is a file system without room.
pub fn join(folder: &Path) {
    let knob = |name: &str| {
        let text = std::fs::read_to_string(folder.join("ksm").join(name)).unwrap();
        text.lines().next().unwrap().to_owned()
    };
    let refused = || {
        for _ in 0..2 {
            let error = attempt(folder).unwrap_err();
            assert!(
                error.contains("run/ksm-users.json") && error.contains("No space left"),
                "{error}"
            );
            assert_eq!(knob("run"), "0", "nothing was changed");
        }
    };
    refused();
    // A list that one more user makes longer than the memory that it has: it stays whole.
    let (list, full) = (folder.join("run/ksm-users.json"), folder.join("run/full"));
    std::fs::remove_file(&full).unwrap();
    std::fs::write(&list, many_users()).unwrap();
    std::fs::write(&full, vec![1_u8; 1 << 20]).unwrap_err();
    refused();
    assert!(std::fs::read_to_string(&list).unwrap().starts_with(&many_users()));

    std::fs::remove_file(&list).unwrap();
    std::fs::remove_file(folder.join("run/full")).unwrap();
    let first = attempt(folder).unwrap();
    assert_eq!(knob("run"), "1");

    // Full again: who is there can still change settings, and leave.
    std::fs::write(folder.join("run/full"), vec![1_u8; 1 << 20]).unwrap_err();
    first.change(&Values::new().with(Knob::MergeAcrossNodes, 0)).unwrap();
    drop(first);
    assert_eq!((knob("run"), knob("merge_across_nodes")), ("0".to_owned(), "1".to_owned()));
    println!("joined and left");
}

#[test]
fn without_room_for_its_record_the_kernel_is_not_asked_to_merge() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("not tested: only root can mount a small file system");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    for part in ["ksm", "run"] {
        std::fs::create_dir(folder.path().join(part)).unwrap();
    }
    for (name, text) in FILES {
        std::fs::write(folder.path().join("ksm").join(name), text).unwrap();
    }
    // In a namespace of its own, which takes the mount along when it ends.
    let preparation =
        "[ -n \"$apart\" ] || apart=1 exec unshare --mount --propagation private sh -e -c '
        mount -t tmpfs -o size=256k none \"$folder/run\"
        ! head -c 1M /dev/zero 2>/dev/null > \"$folder/run/full\"
        exec \"$@\"' sh \"$0\" --exact child::another_process --ignored --nocapture --quiet";
    let said = crate::child::run("joins", folder.path(), preparation);
    assert!(said.contains("joined and left"), "{said}");
}
