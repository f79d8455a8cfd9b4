//! What a guest does around a checkpoint of its machine, and in the machines that are made from it.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, bail};

use crate::wire::Moment;
use crate::{interfaces, reseed};

/// Directory of the scripts.
pub const SCRIPTS: &str = "/etc/ebb/fork.d";
/// How much of a script's last words is sent.
const MOST_WORDS: usize = 1000;

/// Runs all scripts for a moment, in the order of their names. After a checkpoint, the kernel gets
/// new random numbers first, on either side, and in a new machine its own network addresses.
///
/// # Errors
/// The first script that fails; later ones are not run.
pub fn at(moment: Moment, scripts: &Path) -> anyhow::Result<()> {
    let reseed = |random| reseed::reseed(random).context("cannot reseed random numbers");
    match moment {
        Moment::Before => run_all(scripts, &["before"]),
        Moment::Continue { random } => {
            // The scripts undo what those before the checkpoint have done.
            let reseeded = reseed(random);
            run_all(scripts, &["continue"])?;
            reseeded
        }
        Moment::Fork { number, random, macs } => {
            reseed(random)?;
            interfaces::give(&macs).context("cannot set a network address")?;
            run_all(scripts, &["fork", &number.to_string()])
        }
    }
}

fn run_all(scripts: &Path, arguments: &[&str]) -> anyhow::Result<()> {
    for script in find(scripts).with_context(|| format!("cannot read {}", scripts.display()))? {
        run(&script, arguments)?;
    }
    Ok(())
}

/// The executable files whose names consist of letters, digits, `_`, `-` and `.`, as run-parts(8)
/// takes them, with dots inside: what editors and packages leave is not run.
fn find(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut scripts = Vec::new();
    for entry in entries {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte);
        let is_left = name.starts_with('.') || name.contains(".dpkg-");
        let Ok(file) = fs::metadata(&path) else { continue };
        let is_executable = file.is_file() && file.permissions().mode() & 0o111 != 0;
        if is_executable && !is_left && name.bytes().all(is_plain) {
            scripts.push(path);
        }
    }
    scripts.sort();
    Ok(scripts)
}

fn run(script: &Path, arguments: &[&str]) -> anyhow::Result<()> {
    let mut command = Command::new(script);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null());
    let output = command.output().with_context(|| format!("cannot run {}", script.display()))?;
    if !output.status.success() {
        let words = String::from_utf8_lossy(&output.stderr);
        let words: String = words.trim_end().chars().take(MOST_WORDS).collect();
        bail!("{} {}: {} {words}", script.display(), arguments.join(" "), output.status);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scripts_run_in_order_until_one_fails() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let script = |name: &str, text: &str, mode: u32| {
            fs::write(path(name), format!("#!/bin/sh\n{text}\n")).unwrap();
            fs::set_permissions(path(name), fs::Permissions::from_mode(mode)).unwrap();
        };
        let log = path("log").display().to_string();
        script("20-second", &format!("echo second $1 >> {log}"), 0o755);
        script("10-first.sh", &format!("echo first $1 >> {log}"), 0o755);
        script("30-not-executable", &format!("echo third >> {log}"), 0o644);
        script("40-backup~", &format!("echo backup >> {log}"), 0o755);
        script("50-new.dpkg-dist", &format!("echo dpkg >> {log}"), 0o755);
        at(Moment::Before, directory.path()).unwrap();
        run_all(directory.path(), &["continue"]).unwrap();
        let said = fs::read_to_string(&log).unwrap();
        assert_eq!(said, "first before\nsecond before\nfirst continue\nsecond continue\n");
        script("15-fails", "echo no disk >&2; exit 3", 0o755);
        let error = at(Moment::Before, directory.path()).unwrap_err().to_string();
        assert!(error.contains("15-fails before") && error.contains("no disk"), "{error}");
        assert!(fs::read_to_string(&log).unwrap().ends_with("first before\n"));
        at(Moment::Before, &path("missing")).unwrap();
    }
}
