//! The domain of several processes.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use super::*;

/// Body of the child process of other tests.
#[test]
#[ignore = "other tests run it in a process of its own"]
fn in_a_child_process() {
    let folder = PathBuf::from(std::env::var_os("EBB_TEST_FOLDER").unwrap());
    let _domain = KernelDomain::join(&folder, "a").unwrap();
    eprintln!("joined");
    std::thread::sleep(Duration::from_secs(60));
}

/// Another process of domain `a`, which lives until it is killed.
fn other(folder: &Path) -> Child {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "kernel::tests::domain::in_a_child_process", "--ignored", "--nocapture"])
        .env("EBB_TEST_FOLDER", folder)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stderr.take().unwrap()).lines();
    assert!(lines.map_while(Result::ok).any(|line| line.contains("joined")));
    child
}

fn end(mut child: Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn another_domain_is_refused_while_a_process_exists() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().join("made");
    let first = other(&folder);
    let error = KernelDomain::join(&folder, "b").unwrap_err().to_string();
    assert!(
        error.contains("'a'") && error.contains("'b'") && error.contains("merge=owner"),
        "{error}"
    );
    assert!(error.contains(&first.id().to_string()), "{error}");
    let ours = KernelDomain::join(&folder, "a").unwrap();
    end(first);
    // The process that wrote the domain is gone, and others of the domain remain.
    assert!(matches!(KernelDomain::join(&folder, "b"), Err(KsmError::OtherDomain { .. })));
    drop(ours);
    let b = KernelDomain::join(&folder, "b").unwrap();
    let error = KernelDomain::join(&folder, "a").unwrap_err().to_string();
    assert!(error.contains("trust domain 'b'"), "{error}");
    drop(b);
    end(other(&folder));
    KernelDomain::join(&folder, "b").unwrap();
}

/// Whichever comes first: there are never two domains at a time.
#[test]
fn concurrent_processes_are_all_of_one_domain() {
    let folder = tempfile::tempdir().unwrap();
    for _ in 0..50 {
        let joined = std::sync::Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            for number in 0..6 {
                let (joined, folder) = (&joined, folder.path());
                scope.spawn(move || {
                    let domain = ["a", "b", "c"][number % 3];
                    if let Ok(member) = KernelDomain::join(folder, domain) {
                        joined.lock().unwrap().push((domain, member));
                    }
                });
            }
        });
        let joined = joined.into_inner().unwrap();
        assert!(joined.windows(2).all(|pair| pair[0].0 == pair[1].0), "{joined:?}");
        assert!(!joined.is_empty());
    }
}

#[test]
fn the_error_names_an_unusable_file() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("ksm-domain")).unwrap();
    let error = KernelDomain::join(folder.path(), "a").unwrap_err().to_string();
    assert!(error.contains("ksm-domain") && error.contains("trust domain"), "{error}");
}

#[test]
fn a_file_that_others_could_lock_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ksm-domain");
    drop(KernelDomain::join(folder.path(), "a").unwrap());
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    let error = KernelDomain::join(folder.path(), "a").unwrap_err().to_string();
    assert!(error.contains("only this user") && error.contains("ksm-domain"), "{error}");
    fs::remove_file(&path).unwrap();
    std::os::unix::fs::symlink("/dev/null", &path).unwrap();
    assert!(KernelDomain::join(folder.path(), "a").is_err());
}
