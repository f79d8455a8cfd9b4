//! This program run again, in a process that can be limited without limiting other tests.

use std::path::Path;
use std::process::Command;

const ROLE: &str = "EBB_SCARCE_TEST_ROLE";
const FOLDER: &str = "EBB_SCARCE_TEST_FOLDER";

/// Runs `role` after a shell's `preparation`, which may use `$folder`; returns its output on
/// success.
pub fn run(role: &str, folder: &Path, preparation: &str) -> String {
    let script = format!(
        "{preparation}\nexec \"$0\" --exact child::another_process --ignored --nocapture --quiet"
    );
    let output = Command::new("timeout")
        .args(["60", "sh", "-e", "-c", &script])
        .arg(std::env::current_exe().unwrap())
        .env(ROLE, role)
        .env(FOLDER, folder)
        .env("folder", folder)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{}: {said}{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    said
}

/// Body of the other process.
#[test]
#[ignore = "the body of other processes"]
fn another_process() {
    let folder = std::env::var_os(FOLDER).expect("it is run by other tests");
    match std::env::var(ROLE).unwrap().as_str() {
        "merges" => crate::memory::merge(),
        "joins" => crate::run_folder::join(Path::new(&folder)),
        other => panic!("the unknown role {other}"),
    }
}
