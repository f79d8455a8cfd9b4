//! Writes what Debian's packages contain beside programs and documents: man pages and completions
//! from the command lines' definitions, and the licences of the crates that are linked in. It is
//! not part of the packages, so that the programs do not carry this code.

mod licences;
mod pages;
mod settings;

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::Command;
use clap_complete::Shell;

/// Where each shell looks for completions of a system's packages: before and after the name.
const COMPLETIONS: [(Shell, &str, &str); 3] = [
    (Shell::Bash, "usr/share/bash-completion/completions/", ""),
    (Shell::Fish, "usr/share/fish/vendor_completions.d/", ".fish"),
    (Shell::Zsh, "usr/share/zsh/vendor-completions/_", ""),
];

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    let (Some(root), None) = (arguments.next(), arguments.next()) else {
        eprintln!("usage: ebb-packages DIRECTORY, in Ebb's repository");
        return ExitCode::from(2);
    };
    match write_all(&root) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("ebb-packages: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Writes all files below `root`: pages into `man`, completions into their directories below
/// `usr/share`, licences into a directory for each package.
fn write_all(root: &OsString) -> anyhow::Result<()> {
    let root = Path::new(root);
    let daemon = ebbd::program::command();
    let agent = ebb_guest_agent::command_line::command();
    for (command, section) in [(ebb::command(), "1"), (daemon.clone(), "8"), (agent, "8")] {
        pages::write(command, section, &root.join("man")).context("cannot write man pages")?;
    }
    let mut page = file(root, "man/ebbd.toml.5")?;
    page.write_all(settings::page(settings::FILE).as_bytes()).context("cannot write man pages")?;
    let ebb = without_hidden(&ebb::command());
    for (mut command, name, folder) in [(ebb, "ebb", ""), (daemon, "ebbd", "ebbd/")] {
        for (shell, before, after) in COMPLETIONS {
            let mut to = file(root, &format!("{folder}{before}{name}{after}"))?;
            clap_complete::generate(shell, &mut command, name, &mut to);
        }
    }
    let metadata = licences::Metadata::of_this_repository()?;
    for package in ["ebb", "ebbd", "ebb-guest-agent"] {
        licences::write(&metadata, package, file(root, &format!("licences/{package}/licences"))?)?;
    }
    Ok(())
}

/// The command without its hidden subcommands, which clap cannot remove and completions contain.
fn without_hidden(command: &Command) -> Command {
    Command::new("ebb")
        .version(env!("CARGO_PKG_VERSION"))
        .propagate_version(true)
        .args(command.get_arguments())
        .subcommands(command.get_subcommands().filter(|each| !each.is_hide_set()))
}

fn file(root: &Path, path: &str) -> anyhow::Result<File> {
    let path = root.join(path);
    path.parent()
        .map_or(Ok(()), fs::create_dir_all)
        .and_then(|()| File::create(&path))
        .with_context(|| format!("cannot create {}", path.display()))
}
