//! A guest's serial console: events of its agent between lines of its kernel.

use std::collections::VecDeque;
use std::io::{self, BufRead};

use ebb_agent::protocol::{Event, RECORD_SEPARATOR};

/// The longest line that is kept; a guest may send any number of bytes without an end of line.
const LONGEST_LINE_BYTES: usize = 1 << 20;
/// Number of lines to keep, and of those to show with a failure.
const KEPT_LINES: usize = 200;
const SHOWN_LINES: usize = 12;

/// One line of a console.
#[derive(Debug, Clone, PartialEq)]
pub enum Line {
    /// An event of the agent.
    Event(Box<Event>),
    /// Any other line, including damaged events.
    Text(String),
    /// Text at the end of the console that no end of line follows.
    Unfinished(String),
}

/// Classifies a line without its end.
fn classify(line: &[u8]) -> Line {
    match Event::from_line(line) {
        Some(event) => Line::Event(Box::new(event)),
        None => Line::Text(String::from_utf8_lossy(line).trim_end().to_owned()),
    }
}

/// Reads the next line; `None` at the end. Lines beyond the limit are split. `marked` is called as
/// soon as the mark of an event has arrived, which may be long before its end.
///
/// # Errors
/// Those of the reader.
pub fn read_line(reader: &mut impl BufRead, marked: &mut impl FnMut()) -> io::Result<Option<Line>> {
    let mut line = Vec::new();
    loop {
        let available = reader.fill_buf()?;
        if available.is_empty() {
            return Ok((!line.is_empty()).then(|| match classify(&line) {
                Line::Text(_) => Line::Unfinished(String::from_utf8_lossy(&line).into_owned()),
                line => line,
            }));
        }
        let room = LONGEST_LINE_BYTES - line.len();
        let end = available.iter().take(room).position(|&byte| byte == b'\n');
        let taken = end.unwrap_or(available.len().min(room));
        if available[..taken].contains(&RECORD_SEPARATOR) {
            marked();
        }
        line.extend_from_slice(&available[..taken]);
        reader.consume(taken + usize::from(end.is_some()));
        if end.is_some() || line.len() == LONGEST_LINE_BYTES {
            return Ok(Some(classify(&line)));
        }
    }
}

/// The last lines of a console or a log.
#[derive(Debug, Default)]
pub struct Tail(VecDeque<String>);

impl Tail {
    /// Adds a line, and drops the oldest one if there are too many. Empty lines are ignored.
    pub fn push(&mut self, line: String) {
        if line.is_empty() {
            return;
        }
        if self.0.len() == KEPT_LINES {
            self.0.pop_front();
        }
        self.0.push_back(line);
    }

    /// The lines, oldest first.
    pub fn lines(&self) -> impl DoubleEndedIterator<Item = &str> + ExactSizeIterator {
        self.0.iter().map(String::as_str)
    }

    /// The last few lines under a heading, each on a separate line; empty without any.
    pub fn show(&self, heading: &str) -> String {
        if self.0.is_empty() {
            return String::new();
        }
        let first = self.0.len().saturating_sub(SHOWN_LINES);
        let lines: Vec<String> =
            self.lines().skip(first).map(|line| format!("\n    {line}")).collect();
        format!("\n  {heading}:{}", lines.concat())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn lines(bytes: &[u8]) -> Vec<Line> {
        let mut reader = bytes;
        std::iter::from_fn(|| read_line(&mut reader, &mut || {}).unwrap()).collect()
    }

    #[test]
    fn events_are_distinguished_from_text() {
        let event = Event::Started { id: 7 };
        let mut bytes = b"[0.1] Linux\r\n[0.2] half a line".to_vec();
        bytes.extend(event.to_line().unwrap());
        bytes.extend(b"\x1e{\"damaged\nlast words");
        assert_eq!(
            lines(&bytes),
            [
                Line::Text("[0.1] Linux".to_owned()),
                Line::Event(Box::new(event)),
                Line::Text("\u{1e}{\"damaged".to_owned()),
                Line::Unfinished("last words".to_owned())
            ]
        );
    }

    #[test]
    fn the_mark_of_an_event_is_noticed_when_it_arrives() {
        let event = Event::Started { id: 7 };
        let bytes = [b"[0.1] Linux\n[0.2]".as_slice(), &event.to_line().unwrap()].concat();
        // A chunk is a read: the mark is in the third of seven bytes.
        let mut reader = io::BufReader::with_capacity(7, bytes.as_slice());
        let mut marks = 0;
        assert_eq!(
            read_line(&mut reader, &mut || marks += 1).unwrap(),
            Some(Line::Text("[0.1] Linux".to_owned()))
        );
        assert_eq!(marks, 0);
        assert_eq!(
            read_line(&mut reader, &mut || marks += 1).unwrap(),
            Some(Line::Event(Box::new(event)))
        );
        assert_eq!(marks, 1);
    }

    #[test]
    fn a_line_without_end_is_cut() {
        let endless = vec![b'x'; LONGEST_LINE_BYTES + 10];
        let cut = lines(&endless);
        assert_eq!(cut.len(), 2);
        assert_eq!(cut[1], Line::Unfinished("x".repeat(10)));
    }

    #[test]
    fn the_tail_keeps_the_last_lines() {
        let mut tail = Tail::default();
        assert_eq!(tail.show("console"), "");
        for number in 0..KEPT_LINES + 3 {
            tail.push(format!("line {number}"));
            tail.push(String::new());
        }
        let shown = tail.show("console");
        assert!(shown.starts_with("\n  console:\n    line 191\n"), "{shown}");
        assert_eq!(tail.lines().next(), Some("line 3"));
        assert_eq!(shown.lines().count(), SHOWN_LINES + 2);
    }

    proptest! {
        #[test]
        fn every_line_arrives_whatever_the_reads_are_like(
            texts in prop::collection::vec("[a-z\u{1e}]{1,30}", 0..20),
            capacity in 1..40_usize,
        ) {
            let bytes: Vec<u8> =
                texts.iter().flat_map(|text| [text.as_bytes(), b"\n"].concat()).collect();
            let mut reader = io::BufReader::with_capacity(capacity, bytes.as_slice());
            let read: Vec<Line> =
                std::iter::from_fn(|| read_line(&mut reader, &mut || {}).unwrap()).collect();
            let expected: Vec<Line> = texts.iter().map(|text| classify(text.as_bytes())).collect();
            prop_assert_eq!(read, expected);
        }
    }
}
