//! The kernel's log from its ring buffer, including messages that `quiet` hides from the console.

use std::io;

/// Text of the whole ring buffer. Needs CAP_SYSLOG if `kernel.dmesg_restrict` is set.
pub fn read() -> io::Result<String> {
    let size = syslog(SYSLOG_ACTION_SIZE_BUFFER, &mut [])?;
    let mut buffer = vec![0; size];
    let length = syslog(SYSLOG_ACTION_READ_ALL, &mut buffer)?;
    buffer.truncate(length);
    Ok(String::from_utf8_lossy(&buffer).into_owned())
}

/// Actions of syslog(2), from its manual page.
const SYSLOG_ACTION_READ_ALL: libc::c_int = 3;
const SYSLOG_ACTION_SIZE_BUFFER: libc::c_int = 10;

fn syslog(action: libc::c_int, buffer: &mut [u8]) -> io::Result<usize> {
    let length = libc::c_int::try_from(buffer.len()).unwrap_or(libc::c_int::MAX);
    // SAFETY: the kernel writes at most `length` bytes to the buffer, which is at least as long and
    // lives until the call returns.
    let result = unsafe { libc::klogctl(action, buffer.as_mut_ptr().cast(), length) };
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// Selects the lines that contain one of `words`, ignoring case, or all lines if `words` is empty;
/// of these the last ones that fit into `limit_bytes`.
pub fn select(log: &str, words: &[String], limit_bytes: usize) -> String {
    let words: Vec<String> = words.iter().map(|word| word.to_lowercase()).collect();
    let wanted = |line: &&str| {
        let line = line.to_lowercase();
        words.is_empty() || words.iter().any(|word| line.contains(word))
    };
    let mut left_bytes = limit_bytes;
    let mut lines: Vec<&str> = log
        .lines()
        .rev()
        .filter(wanted)
        .take_while(|line| {
            let fits = line.len() < left_bytes;
            left_bytes = left_bytes.saturating_sub(line.len() + 1);
            fits
        })
        .collect();
    lines.reverse();
    lines.iter().flat_map(|line| [line, "\n"]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LOG: &str =
        "<6>[ 0.1] Linux\n<0>[ 9.0] watchdog: BUG: soft lockup - CPU#1 stuck\n<4>[ 9.1] end\n";

    #[test]
    fn lines_are_selected_by_words() {
        assert_eq!(select(LOG, &[], 1000), LOG);
        let words = ["SOFT lockup".to_owned(), "hung task".to_owned()];
        assert_eq!(
            select(LOG, &words, 1000),
            "<0>[ 9.0] watchdog: BUG: soft lockup - CPU#1 stuck\n"
        );
        assert_eq!(select(LOG, &["rcu".to_owned()], 1000), "");
    }

    #[test]
    fn the_last_lines_are_kept() {
        assert_eq!(select(LOG, &[], 20), "<4>[ 9.1] end\n");
        assert_eq!(select(LOG, &[], 0), "");
    }

    proptest! {
        #[test]
        fn the_limit_applies_to_whole_lines(
            lines in prop::collection::vec("[a-c]{0,9}", 0..20),
            limit in 0_usize..100,
        ) {
            let log: String = lines.iter().flat_map(|line| [line, "\n"]).collect();
            let selected = select(&log, &[], limit);
            prop_assert!(selected.len() <= limit);
            prop_assert!(log.ends_with(&selected));
            prop_assert!(selected.is_empty() || selected.ends_with('\n'));
            let before = &log[..log.len() - selected.len()];
            prop_assert!(before.is_empty() || before.ends_with('\n'), "{selected:?}");
            let next = before.lines().last().map_or(0, |line| line.len() + 1);
            prop_assert!(
                before.is_empty() || selected.len() + next > limit,
                "one more line would have fitted"
            );
        }
    }
}
