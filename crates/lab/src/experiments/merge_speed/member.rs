//! A process whose memory is merged. It reads orders from its standard input and answers each on
//! its standard output, both as lines of JSON.

use std::io::{BufRead, Write};
use std::ops::Range;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use ebb_guest_ram::KernelMerging;
use serde::{Deserialize, Serialize};

use super::content::{Contents, Shape};
use super::memory::Arena;
use super::owner::Owner;
use super::sibling::{Mark, Sibling};
use crate::LabError;

/// The lab's command for such a process.
pub const COMMAND: &str = "merge-member";

/// Time for which a second thread is measured before merging begins.
const CALM: Duration = Duration::from_millis(250);
/// Maximum number of pages that are written to.
const WRITES: usize = 20_000;

/// What merges the memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Means {
    /// The process itself, with the broker at this socket if there are others.
    Owner(Option<PathBuf>),
    /// KSM's thread.
    Kernel,
}

/// What a process's memory contains, and how it is merged: the first line that it reads.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Task {
    pub(super) shape: Shape,
    /// Pages of all processes.
    pub(super) pages: usize,
    pub(super) seed: u64,
    /// Number of this process.
    pub(super) process: usize,
    pub(super) means: Means,
}

/// Pages to write to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Which {
    /// Those that have an equal one.
    Equal,
    /// The others.
    Unequal,
}

/// What the process is to do; each order has an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Order {
    /// Passes over all memory (owner).
    Pass(u64),
    /// Reads each page.
    Read,
    /// Counts the pages with another content than was written.
    Check,
    /// Writes to pages.
    Write(Which),
    /// Starts a second thread.
    Company,
    /// Ends it.
    Alone,
}

/// An answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) enum Answer {
    /// The memory was written; its addresses.
    Ready(Vec<Range<u64>>),
    /// What was achieved so far (owner).
    Progress(Progress),
    /// Number of pages; 0 for an order that counts none.
    Pages(u64),
    /// Processor time for each page in ns; `None` without such pages.
    Ns(Option<f64>),
    /// Rounds per second of the second thread.
    Rate(Option<f64>),
    /// The reason why it cannot.
    Failed(String),
}

/// State of an owner's merging.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Progress {
    /// Pages that are merged now.
    pub(super) merged: u64,
    /// Pages read in all passes.
    pub(super) read: u64,
    /// Bytes of its tables.
    pub(super) metadata_bytes: u64,
}

/// Serves until the end of the input.
///
/// # Errors
/// [`LabError::Merging`]: the lab has gone, or does not speak this language.
pub fn serve(input: impl BufRead, mut output: impl Write) -> Result<(), LabError> {
    let failed = |error: &dyn std::fmt::Display| LabError::Merging(format!("the lab: {error}"));
    let mut lines = input.lines();
    let mut member = None;
    while let Some(line) = lines.next().transpose().map_err(|error| failed(&error))? {
        let answer = match &mut member {
            None => serde_json::from_str(&line)
                .map_err(|error| failed(&error))
                .and_then(|task| Member::new(&task))
                .map(|new| Answer::Ready(member.insert(new).addresses())),
            Some(member) => serde_json::from_str(&line)
                .map_err(|error| failed(&error))
                .and_then(|order| member.obey(order)),
        };
        let answer = answer.unwrap_or_else(|error| Answer::Failed(error.to_string()));
        let line = serde_json::to_string(&answer).map_err(|error| failed(&error))?;
        writeln!(output, "{line}").and_then(|()| output.flush()).map_err(|error| failed(&error))?;
    }
    Ok(())
}

struct Member {
    arena: Arena,
    have_equals: Vec<bool>,
    owner: Option<Owner>,
    company: Option<(Sibling, Mark)>,
}

impl Member {
    fn new(task: &Task) -> Result<Self, LabError> {
        let mut contents = Contents::new(task.shape, task.pages, task.seed);
        let have_equals = contents.have_equals(task.process);
        let own = contents.memories.swap_remove(task.process);
        let owner = match &task.means {
            Means::Owner(broker) => Some(Owner::new(broker.clone())),
            Means::Kernel => None,
        };
        let arena = Arena::new(own, task.shape.huge_pages(), |ram| match &owner {
            Some(owner) => owner.prepare(ram),
            None => ram
                .advise_mergeable(KernelMerging::Allow)
                .map_err(|error| LabError::Merging(error.to_string())),
        })?;
        Ok(Self { arena, have_equals, owner, company: None })
    }

    fn addresses(&self) -> Vec<Range<u64>> {
        let range = |start: u64, bytes: u64| start..start + bytes;
        self.arena.ram.regions().iter().map(|it| range(it.host_address, it.size_bytes)).collect()
    }

    fn obey(&mut self, order: Order) -> Result<Answer, LabError> {
        match order {
            Order::Pass(passes) => match &mut self.owner {
                Some(owner) => owner.pass(&self.arena, passes).map(Answer::Progress),
                None => Err(LabError::Merging("this process does not merge".to_owned())),
            },
            Order::Read => self.arena.read().map(|()| Answer::Pages(0)),
            Order::Check => self.arena.wrong_pages().map(Answer::Pages),
            Order::Write(which) => self.write(which).map(Answer::Ns),
            Order::Company => self.start_company().map(Answer::Rate),
            Order::Alone => Ok(Answer::Rate(
                self.company.take().and_then(|(sibling, mark)| sibling.rounds_per_s(mark)),
            )),
        }
    }

    fn write(&self, which: Which) -> Result<Option<f64>, LabError> {
        let wanted = which == Which::Equal;
        let places = self.have_equals.iter().enumerate().filter(|(_, equal)| **equal == wanted);
        let places: Vec<usize> = places.map(|(place, _)| place).take(WRITES).collect();
        Some(&places)
            .filter(|places| !places.is_empty())
            .map(|places| self.arena.write_to(places))
            .transpose()
    }

    fn start_company(&mut self) -> Result<Option<f64>, LabError> {
        let sibling = Sibling::start()?;
        // The thread's memory is touched for the first time now.
        thread::sleep(CALM / 4);
        let mark = sibling.mark();
        thread::sleep(CALM);
        let rate = sibling.rounds_per_s(mark);
        let mark = sibling.mark();
        self.company = Some((sibling, mark));
        Ok(rate)
    }
}

#[cfg(test)]
mod tests {
    use ebb_guest_ram::{HugePages, MergeSession, StableSegments};

    use super::super::memory;
    use super::*;

    /// Whether this kernel lets a process merge its memory.
    fn can_merge() -> bool {
        let ram = memory::map(512, HugePages::Off).unwrap();
        ram.enable_merging(StableSegments::new()).is_ok()
            && MergeSession::new(std::sync::Arc::new(ram)).is_ok()
    }

    /// What a member answers to these lines.
    fn answers(lines: &[String]) -> Vec<Answer> {
        let mut output = Vec::new();
        serve(lines.join("\n").as_bytes(), &mut output).unwrap();
        let text = String::from_utf8(output).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    fn task(means: Means) -> String {
        let task = Task { shape: Shape::ScatteredSmall, pages: 4096, seed: 1, process: 0, means };
        serde_json::to_string(&task).unwrap()
    }

    fn order(order: Order) -> String {
        serde_json::to_string(&order).unwrap()
    }

    #[test]
    fn an_owner_merges_reads_and_writes_what_it_is_told() {
        if !can_merge() {
            return;
        }
        let mut lines = vec![task(Means::Owner(None)), order(Order::Company)];
        lines.extend(vec![order(Order::Pass(2)); 4]);
        lines.extend([
            order(Order::Alone),
            order(Order::Read),
            order(Order::Check),
            order(Order::Write(Which::Equal)),
            order(Order::Write(Which::Unequal)),
            order(Order::Check),
        ]);
        let answers = answers(&lines);
        let Answer::Ready(addresses) = &answers[0] else { panic!("{answers:?}") };
        assert_eq!(addresses.iter().map(|it| it.end - it.start).sum::<u64>(), 16 << 20);
        let Answer::Progress(progress) = answers[5] else { panic!("{answers:?}") };
        assert_eq!(progress.merged, 2048, "{answers:?}");
        assert!(progress.read >= 4096, "{answers:?}");
        assert!(matches!(answers[6], Answer::Rate(Some(rate)) if rate > 0.0), "{answers:?}");
        assert_eq!(answers[8], Answer::Pages(0));
        assert!(matches!(answers[9], Answer::Ns(Some(ns)) if ns > 0.0), "{answers:?}");
        assert_eq!(answers[11], Answer::Pages(0));
    }

    #[test]
    fn lines_that_are_no_orders_are_answered_with_the_reason() {
        let bad = |answer: &Answer| matches!(answer, Answer::Failed(_));
        assert!(answers(&["{}".to_owned(), order(Order::Read)]).iter().all(bad));
        let owner = task(Means::Owner(Some("/no/such/socket".into())));
        let answers = answers(&[owner, "Fly".to_owned(), order(Order::Pass(1))]);
        assert!(answers.iter().skip(1).all(bad), "{answers:?}");
    }
}
