//! Selection of the lines of a text that are sent to the host, where each byte costs.

/// Selects the lines that contain one of `words`, ignoring case, or all lines if `words` is empty;
/// of these the last ones that fit into `limit_bytes`.
pub fn select_lines(text: &str, words: &[String], limit_bytes: usize) -> String {
    let words: Vec<String> = words.iter().map(|word| word.to_lowercase()).collect();
    let wanted = |line: &&str| {
        let line = line.to_lowercase();
        words.is_empty() || words.iter().any(|word| line.contains(word))
    };
    let mut left_bytes = limit_bytes;
    let mut lines: Vec<&str> = text
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
        assert_eq!(select_lines(LOG, &[], 1000), LOG);
        let words = ["SOFT lockup".to_owned(), "hung task".to_owned()];
        assert_eq!(
            select_lines(LOG, &words, 1000),
            "<0>[ 9.0] watchdog: BUG: soft lockup - CPU#1 stuck\n"
        );
        assert_eq!(select_lines(LOG, &["rcu".to_owned()], 1000), "");
    }

    #[test]
    fn the_last_lines_are_kept() {
        assert_eq!(select_lines(LOG, &[], 20), "<4>[ 9.1] end\n");
        assert_eq!(select_lines(LOG, &[], 0), "");
    }

    proptest! {
        #[test]
        fn the_limit_applies_to_whole_lines(
            lines in prop::collection::vec("[a-c]{0,9}", 0..20),
            limit in 0_usize..100,
        ) {
            let log: String = lines.iter().flat_map(|line| [line, "\n"]).collect();
            let selected = select_lines(&log, &[], limit);
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
