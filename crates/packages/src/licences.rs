//! The licences of the crates that a program is linked from. They require their texts to be
//! distributed with the program.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};
use serde::Deserialize;

/// Beginnings of the names of files with a licence or a copyright notice, in capitals.
const NAMES: [&str; 5] = ["LICENSE", "LICENCE", "COPYING", "COPYRIGHT", "NOTICE"];
const TARGET: &str = "x86_64-unknown-linux-gnu";
const RULE: &str =
    "--------------------------------------------------------------------------------";

/// The part of `cargo metadata` that is used here.
#[derive(Debug, Deserialize)]
pub struct Metadata {
    packages: Vec<Package>,
    resolve: Resolve,
}

#[derive(Debug, Deserialize)]
struct Package {
    id: String,
    name: String,
    version: String,
    license: Option<String>,
    /// None for crates of this repository.
    source: Option<String>,
    manifest_path: PathBuf,
}

#[derive(Debug, Deserialize)]
struct Resolve {
    nodes: Vec<Node>,
}

#[derive(Debug, Deserialize)]
struct Node {
    id: String,
    deps: Vec<Dependency>,
}

#[derive(Debug, Deserialize)]
struct Dependency {
    pkg: String,
    dep_kinds: Vec<DependencyKind>,
}

#[derive(Debug, Deserialize)]
struct DependencyKind {
    /// None for what is linked; other kinds are for build scripts and tests.
    kind: Option<String>,
}

impl Metadata {
    /// Runs cargo in the current directory.
    pub fn of_this_repository() -> anyhow::Result<Self> {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let output = Command::new(cargo)
            .args(["metadata", "--locked", "--format-version", "1", "--filter-platform", TARGET])
            .output()
            .context("cannot run cargo")?;
        ensure!(
            output.status.success(),
            "cargo metadata failed: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        serde_json::from_slice(&output.stdout).context("cargo metadata printed something else")
    }

    /// The crates from outside of this repository that the package `name` is linked from, by name
    /// and version.
    fn linked(&self, name: &str) -> anyhow::Result<Vec<&Package>> {
        let packages: HashMap<_, _> = self.packages.iter().map(|each| (&each.id, each)).collect();
        let nodes: HashMap<_, _> = self.resolve.nodes.iter().map(|each| (&each.id, each)).collect();
        let first = self.packages.iter().find(|each| each.source.is_none() && each.name == name);
        let mut waiting = vec![&first.with_context(|| format!("no package {name}"))?.id];
        let mut seen = BTreeSet::new();
        while let Some(id) = waiting.pop() {
            if seen.insert(id) {
                let node = nodes.get(id).with_context(|| format!("no dependencies of {id}"))?;
                let linked = |each: &&Dependency| each.dep_kinds.iter().any(|of| of.kind.is_none());
                waiting.extend(node.deps.iter().filter(linked).map(|each| &each.pkg));
            }
        }
        let mut linked: Vec<_> = seen
            .into_iter()
            .filter_map(|id| packages.get(id).copied())
            .filter(|each| each.source.is_some())
            .collect();
        linked.sort_by_key(|each| (&each.name, &each.version));
        Ok(linked)
    }
}

/// Writes the crates that the package `name` is linked from, each with its licence, and then each
/// text with the crates that it came from.
pub fn write(metadata: &Metadata, name: &str, mut to: impl Write) -> anyhow::Result<()> {
    let linked = metadata.linked(name)?;
    let mut texts: BTreeMap<String, Vec<String>> = BTreeMap::new();
    writeln!(to, "Crates that {name} is statically linked from, and their licences:\n")?;
    for &package in &linked {
        let crate_name = format!("{} {}", package.name, package.version);
        let licence = package.license.as_deref().unwrap_or("no licence named");
        writeln!(to, "{crate_name}: {licence}")?;
        let files = files_of(package)?;
        // A crate without a text has one of the licences of which another one brings the text.
        let has_text = |other: &&Package| {
            other.license == package.license && files_of(other).is_ok_and(|files| !files.is_empty())
        };
        ensure!(
            linked.iter().any(has_text),
            "no crate comes with the text of the licence of {crate_name}"
        );
        for file in files {
            let text =
                fs::read(&file).with_context(|| format!("cannot read {}", file.display()))?;
            let text = String::from_utf8_lossy(&text).replace('\r', "").trim_end().to_owned();
            let crates = texts.entry(text).or_default();
            if crates.last() != Some(&crate_name) {
                crates.push(crate_name.clone());
            }
        }
    }
    for (text, crates) in texts {
        writeln!(to, "\n{RULE}\n{}\n{RULE}\n\n{text}", crates.join(", "))?;
    }
    Ok(())
}

/// The files with licences in a crate's directory, by name.
fn files_of(package: &Package) -> anyhow::Result<Vec<PathBuf>> {
    let directory = package.manifest_path.parent().unwrap_or(Path::new("/"));
    let mut files = Vec::new();
    for entry in
        fs::read_dir(directory).with_context(|| format!("cannot read {}", directory.display()))?
    {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().to_uppercase();
        if (NAMES.iter().any(|start| name.starts_with(start)) || name == "UNLICENSE")
            && entry.file_type()?.is_file()
        {
            files.push(entry.path());
        }
    }
    files.sort();
    Ok(files)
}
