//! What a thread gives up once everything is opened.

use std::io;

use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};

/// Drops every capability of the calling thread, and the possibility to get any back through
/// `execve`. Capabilities are a thread's own: each thread of the monitor does this when it starts,
/// the main one when everything is opened.
pub fn drop_all() -> io::Result<()> {
    rustix::thread::set_no_new_privs(true)?;
    let empty = CapabilitySet::empty();
    set_capabilities(
        None,
        CapabilitySets { effective: empty, permitted: empty, inheritable: empty },
    )?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::thread::capabilities;

    #[test]
    fn nothing_is_left() {
        // On a thread of its own: the test runner keeps what it has.
        let left = std::thread::spawn(|| {
            drop_all().unwrap();
            capabilities(None).unwrap()
        });
        let left = left.join().unwrap();
        assert!(
            left.effective.is_empty() && left.permitted.is_empty() && left.inheritable.is_empty()
        );
    }
}
