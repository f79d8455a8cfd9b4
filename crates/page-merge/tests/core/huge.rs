//! Huge pages are kept unless they are cold and mostly duplicate.

use crate::support::{Host, eager};

#[test]
fn placeholder() {
    let _ = Host::new(eager(), 1);
}
