//! What is shown, from documents and keys. No I/O: the time comes with each input.

use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use ebb_host_policy::Host;
use ebb_host_policy::report::Status;

use super::act::Act;
use super::documents::{Report, Row, line};
use super::growth::Growth;
use super::keys::Mode;
use crate::ctl::duration;
use crate::host::{level_text, memory_text};

/// Where machines come from.
#[derive(Clone, Debug)]
pub(super) enum Source {
    /// From the daemon.
    Daemon,
    /// From monitors without one.
    Monitors(Vec<PathBuf>),
}

/// The order of machines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sort {
    /// By name.
    Name,
    /// The largest resident memory first.
    Resident,
    /// The largest use first.
    InUse,
    /// The fastest growth first.
    Growth,
}

impl Sort {
    /// The next one.
    pub(super) fn next(self) -> Self {
        match self {
            Self::Name => Self::Resident,
            Self::Resident => Self::InUse,
            Self::InUse => Self::Growth,
            Self::Growth => Self::Name,
        }
    }

    /// Its name in the help line.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Name => "name",
            Self::Resident => "resident",
            Self::InUse => "in use",
            Self::Growth => "growth",
        }
    }
}

/// Everything that is shown.
#[derive(Debug)]
pub(super) struct Model {
    pub(super) source: Source,
    pub(super) host: Option<Host>,
    /// The host in words.
    pub(super) summary: String,
    /// What is wrong with the daemon itself, by its own account.
    pub(super) problems: Vec<String>,
    /// Why the daemon gives no answer.
    pub(super) trouble: Option<String>,
    /// When it has last answered.
    heard: Option<Duration>,
    now: Duration,
    rows: Vec<Row>,
    /// Indices of the rows that pass the filter, in order.
    shown: Vec<usize>,
    growth: Growth,
    pub(super) sort: Sort,
    pub(super) filter: String,
    /// The selected machine, by its socket: it stays selected when the order changes.
    selected: Option<String>,
    position: usize,
    pub(super) mode: Mode,
    /// The last thing to say.
    pub(super) message: Option<String>,
    /// What is under way.
    pub(super) acts: Vec<Act>,
}

impl Model {
    /// A view before the first answer.
    pub(super) fn new(source: Source) -> Self {
        let rows = match &source {
            Source::Daemon => Vec::new(),
            Source::Monitors(sockets) => sockets.iter().map(|path| Row::of_socket(path)).collect(),
        };
        let mut model = Self {
            source,
            host: None,
            summary: "no answer yet".to_owned(),
            problems: Vec::new(),
            trouble: None,
            heard: None,
            now: Duration::ZERO,
            rows,
            shown: Vec::new(),
            growth: Growth::default(),
            sort: Sort::Name,
            filter: String::new(),
            selected: None,
            position: 0,
            mode: Mode::List,
            message: None,
            acts: Vec::new(),
        };
        model.arrange();
        model
    }

    /// Takes the time, since the program's start.
    pub(super) fn tick(&mut self, now: Duration) {
        self.now = now;
    }

    /// Takes news.
    pub(super) fn receive(&mut self, report: Report) {
        match report {
            Report::Daemon(Ok(status)) => self.status(status),
            Report::Daemon(Err(trouble)) => self.trouble = Some(line(&trouble)),
            Report::Host(host) => {
                let (memory, swap) = memory_text(&host);
                (self.summary, self.host) = (format!("host: {memory}, {swap}"), Some(host));
            }
            Report::Monitor(index, answer) => {
                if let Some(row) = self.rows.get_mut(index) {
                    row.answer(answer);
                }
            }
            Report::Done(act, result) => {
                self.acts.retain(|other| *other != act);
                let (Ok(text) | Err(text)) = result;
                self.message = Some(line(text.trim_end()));
            }
        }
        self.grow();
        self.arrange();
    }

    fn status(&mut self, status: Status) {
        (self.heard, self.trouble) = (Some(self.now), None);
        self.summary = line(&level_text(&status));
        self.problems = status.problems.iter().map(|problem| line(problem)).collect();
        self.host = Some(status.host);
        let at_ms = status.at_ms;
        let machines = status.machines.into_iter();
        self.rows = machines.map(|machine| Row::of_daemon(machine, at_ms)).collect();
    }

    fn grow(&mut self) {
        let mut keys = BTreeSet::new();
        for row in &mut self.rows {
            let key = row.key();
            if let Some(resident) = row.resident_bytes() {
                self.growth.add(&key, row.at_ms, resident);
            }
            row.growth = self.growth.rate(&key);
            keys.insert(key);
        }
        self.growth.retain(&keys);
    }

    /// Sorts and filters, and keeps the selection.
    pub(super) fn arrange(&mut self) {
        let filter = self.filter.to_lowercase();
        let passes = |row: &Row| row.status.name.to_lowercase().contains(&filter);
        let rows = &self.rows;
        self.shown = (0..rows.len()).filter(|index| passes(&rows[*index])).collect();
        self.shown.sort_by(|one, other| {
            let (one, other) = (&rows[*one], &rows[*other]);
            let by_size = match self.sort {
                Sort::Name => Ordering::Equal,
                // What is not known is smaller than all that is.
                Sort::Resident => other.resident_bytes().cmp(&one.resident_bytes()),
                Sort::InUse => other.used_bytes().cmp(&one.used_bytes()),
                Sort::Growth => other.growth.cmp(&one.growth),
            };
            let (one, other) = (&one.status, &other.status);
            by_size.then_with(|| (&one.name, &one.socket).cmp(&(&other.name, &other.socket)))
        });
        let place = self.shown().position(|row| Some(&row.status.socket) == self.selected.as_ref());
        // If the machine has gone, or does not pass the filter, one at its place is selected.
        self.select(place.unwrap_or(self.position));
    }

    /// The rows that are shown, in order.
    pub(super) fn shown(&self) -> impl ExactSizeIterator<Item = &Row> {
        self.shown.iter().map(|index| &self.rows[*index])
    }

    /// How many machines there are.
    pub(super) fn count(&self) -> usize {
        self.rows.len()
    }

    /// The selected machine.
    pub(super) fn selected(&self) -> Option<&Row> {
        self.shown().nth(self.position)
    }

    /// The place of the selected machine among those that are shown; 0 without one.
    pub(super) fn position(&self) -> usize {
        self.position
    }

    /// Selects the machine at a place, or the last one before it.
    pub(super) fn select(&mut self, position: usize) {
        self.position = position.min(self.shown.len().saturating_sub(1));
        if let Some(row) = self.selected() {
            self.selected = Some(row.status.socket.clone());
        }
    }

    /// What is wrong with the answers, with the age of the last one.
    pub(super) fn trouble_text(&self) -> Option<String> {
        let trouble = self.trouble.as_ref()?;
        Some(match self.heard {
            None => trouble.clone(),
            Some(heard) => {
                let age_ms = self.now.saturating_sub(heard).as_millis();
                let age = duration(u64::try_from(age_ms).unwrap_or(u64::MAX));
                format!("as of {age} ago: {trouble}")
            }
        })
    }
}
