//! The committed page is the rendering of the committed results.

#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::{env, fs};

use ebb_lab::report::collection;

/// `UPDATE=1 cargo test -p ebb-lab --test results` rewrites the page.
#[test]
fn the_page_is_rendered_from_the_documents() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let all = collection::read_all(&docs.join("results")).unwrap();
    assert!(!all.is_empty());
    for results in &all {
        let name = docs.join(format!("results/{}.json", results.experiment));
        assert!(name.is_file(), "{} is not named after its experiment", name.display());
    }
    let (page, rendered) = (docs.join("results.md"), collection::render(&all));
    if env::var_os("UPDATE").is_some() {
        fs::write(&page, &rendered).unwrap();
    }
    let committed = fs::read_to_string(&page).unwrap_or_default();
    assert!(
        committed == rendered,
        "docs/results.md is out of date; rewrite it with UPDATE=1 cargo test -p ebb-lab --test \
         results"
    );
}
