//! Every crate that Ebb is built from must have a licence compatible with Apache-2.0.

use std::process::Command;

use spdx::{Expression, LicenseReq, ParseMode};

const ALLOWED: [&str; 14] = [
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-1-Clause",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "ISC",
    "MIT",
    "MIT-0",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

fn allowed(licence: &str) -> bool {
    let Ok(expression) = Expression::parse_mode(licence, ParseMode::LAX) else { return false };
    expression
        .evaluate(|requirement: &LicenseReq| ALLOWED.contains(&requirement.to_string().as_str()))
}

#[test]
fn all_licences_are_compatible_with_apache_2() {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--locked", "--format-version", "1"])
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: serde_json::Value =
        serde_json::from_slice(&output.stdout).expect("cargo prints JSON");
    let packages = metadata["packages"].as_array().expect("a list of packages");
    assert!(packages.len() > 50, "only {} packages", packages.len());
    let bad: Vec<String> = packages
        .iter()
        .filter(|package| !package["license"].as_str().is_some_and(allowed))
        .map(|package| {
            format!("{} {}: {}", package["name"], package["version"], package["license"])
        })
        .collect();
    assert!(bad.is_empty(), "licences incompatible with Apache-2.0: {bad:#?}");
}

#[test]
fn other_licences_are_detected() {
    assert!(allowed("MIT/Apache-2.0"));
    assert!(allowed("(MIT OR Apache-2.0) AND Unicode-3.0"));
    assert!(!allowed("GPL-3.0-only"));
    assert!(!allowed("MIT AND GPL-2.0-only"));
    assert!(!allowed(""));
}
